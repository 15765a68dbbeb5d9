"""What data costs: augmentation and generation beside a training step, reading and memory of MNIST, images a second.

python -m benchmarks.data --repeat 5

Needs the files of MNIST and CIFAR-10 ('torchcaps data get mnist', 'torchcaps data get cifar10', or the folder that has
them in TORCHCAPS_DATA). All of it is on one thread; of CPU times and rates the best of several interleaved passes
counts.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import torchcaps
from torchcaps.bench.record import write_record
from torchcaps.data import Batch, DataError, Loader, create_dataset

ROOT = Path(__file__).resolve().parent.parent
BATCH = 128
# data set, pipeline, split, and the model, with its layers for images of that size: a CapsNet of the usual width
CASES: list[tuple[str, str, str, str]] = [
    ("mnist", "sabour2017.mnist", "train", "sabour2017_mnist"),
    ("mnist", "choi2019.mnist+official", "train", "sabour2017_mnist"),
    ("cifar10", "sabour2017.cifar10", "test", "sabour2017_mnist"),
    ("cifar10", "choi2019.cifar10+", "test", "sabour2017_mnist"),
    ("cifar10", "tsai2020.cifar10", "test", "sabour2017_mnist"),
    ("multimnist", "", "train", "sabour2017_multimnist"),
    ("diverse-multimnist", "", "train", "sabour2017_multimnist"),
]


def training_step(name: str, batch: Batch) -> Callable[[], None]:
    """Return a function that trains a model for one step on a batch, as its recipe says."""
    torch.manual_seed(0)
    model = torchcaps.create_model(name, image=tuple(batch.images.shape[1:]))
    loss, optimizer = model.loss(), model.recipe.optimizer.make(model.parameters())
    labels = batch.labels
    if labels.dtype.is_floating_point:  # any number of digits: the model takes two
        labels = labels.topk(2, dim=1).indices

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch.images, labels), labels, batch.targets).backward()
        optimizer.step()

    return step


def cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def beside_a_step(case: tuple[str, str, str, str], repeat: int) -> dict[str, Any]:
    """Compare making a batch, from its indices to the numbers the network sees, with a training step on it."""
    name, pipeline, split, model = case
    loader = Loader(create_dataset(name, split, download=False), BATCH, pipeline=pipeline, train=True, drop_last=True)
    step = training_step(model, loader.batch(0, 0))
    making, training = float("inf"), float("inf")
    for number in range(repeat):
        for batch in range(20):
            making = min(making, cpu_seconds(lambda number=20 * number + batch: loader.batch(0, number % len(loader))))
        training = min(training, cpu_seconds(step))
    return {
        "case": f"{name}, {pipeline}" if pipeline else name,
        "model": model,
        "batch_seconds": making,
        "step_seconds": training,
        "share": making / training,
    }


def reading(repeat: int) -> float:
    """Return the seconds that all of MNIST takes from its gzipped files."""
    least = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for split in ("train", "test"):
            create_dataset("mnist", split, download=False)
        least = min(least, time.perf_counter() - start)
    return least


MEMORY = """
import torch
from torchcaps.bench.memory import resident_peak
from torchcaps.data import Loader, create_dataset

torch.set_num_threads(1)
before = resident_peak()
loaders = [Loader(create_dataset("mnist", split, download=False), 128, pipeline="sabour2017.mnist")
           for split in ("train", "test")]
for loader in loaders:
    for batch in loader.epoch(0):
        pass
print(resident_peak() - before)
"""


def memory() -> int:
    """Return by how many bytes a process grows, at most, that reads MNIST and goes through it once."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(run.stdout)


def rate(repeat: int) -> float:
    """Return how many MultiMNIST images a second the loader makes."""
    loader = Loader(create_dataset("multimnist", download=False), BATCH)
    best = 0.0
    for epoch in range(repeat):
        start = time.perf_counter()
        for number in range(100):
            loader.batch(epoch, number)
        best = max(best, 100 * BATCH / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3, help="passes of which the best counts (default: 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/bench/data.json", help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat must be 1 or more, got {arguments.repeat}")
    torch.set_num_threads(1)
    try:
        create_dataset("mnist", download=False)
        create_dataset("cifar10", "test", download=False)
    except DataError as error:
        sys.exit(f"bench: {error}")
    table = Table(box=box.SIMPLE_HEAD, title=f"making {BATCH} images beside a training step on them; CPU, one thread")
    for heading in ("data, pipeline", "model", "making", "a step", "share"):
        table.add_column(heading, justify="left" if heading in ("data, pipeline", "model") else "right")
    rows = []
    for case in track(CASES, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        row = beside_a_step(case, arguments.repeat)
        rows.append(row)
        times = f"{1e3 * row['batch_seconds']:.1f} ms", f"{row['step_seconds']:.2f} s", f"{100 * row['share']:.2f} %"
        table.add_row(row["case"], row["model"], *times)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    whole = {
        "case": "whole",
        "mnist_read_seconds": reading(arguments.repeat),
        "mnist_bytes": memory(),
        "multimnist_per_second": rate(arguments.repeat),
    }
    print(
        f"all of MNIST from its gzipped files: {whole['mnist_read_seconds']:.2f} s, {whole['mnist_bytes'] / 1e6:.0f} MB"
    )
    print(f"MultiMNIST by the loader: {whole['multimnist_per_second']:,.0f} images a second")
    write_record(arguments.out, "benchmarks.data", [*rows, whole])


if __name__ == "__main__":
    main()
