"""The memory that training takes: as told before it runs, and as measured.

python -m benchmarks.training_memory                     all cases, a table, and results/bench/training_memory.json
python -m benchmarks.training_memory sabour2017_mnist:64 choi2019_mnist:100:streamed
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import torchcaps
from torchcaps.bench.memory import resident_peak
from torchcaps.bench.record import write_record
from torchcaps.models import Network
from torchcaps.profiling.memory import estimate_memory

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"auto": "auto", "stored": False, "streamed": True}
CASES = [
    "sabour2017_mnist:128:stored",
    "sabour2017_mnist:128:streamed",
    "sabour2017_multimnist:64:auto",
    "choi2019_mnist:100:auto",
    "choi2019_cifar10:32:auto",
    "tsai2020_cifar10:8:stored",
    "tsai2020_cifar10:32:streamed",
    "tsai2020_cifar10:128:streamed",
    "tsai2020_em_cifar10:16:streamed",
    "tsai2020_resnet18_cifar10:64:auto",
    "chen2019_multi_cifar10:100:auto",
    "yang2021_mnist:64:auto",
    "hinton2018_smallnorb:16:streamed",
]
MEBIBYTE = 2**20


def build(case: str) -> tuple[Network, int]:
    """Return the model and the batch size of ``model:batch:way``."""
    name, batch, way = (*case.split(":"), "auto")[:3]
    model = torchcaps.create_model(name)
    if hasattr(model.spec, "streamed"):
        model = torchcaps.create_model(name, streamed=WAYS[way])
    return model, int(batch)


def take_steps(model: Network, batch: int, count: int) -> None:
    """Train for a few steps on noise, as the model's recipe has it."""
    optimizer, loss = model.recipe.optimizer.make(model.parameters()), model.loss()
    n_objects = model.n_objects or 1
    for _ in range(count):
        images = torch.rand(batch, *model.spec.image)
        labels = torch.arange(batch * n_objects).view(batch, n_objects) % model.spec.classes
        labels = labels[:, 0] if n_objects == 1 else labels
        targets = images if n_objects == 1 else images.unsqueeze(1).expand(-1, n_objects, -1, -1, -1)
        optimizer.zero_grad()
        loss(model(images, labels), labels, targets).backward()
        optimizer.step()


def measure(case: str) -> int:
    """Return what two training steps add to a process that has taken steps with a small model before."""
    torch.manual_seed(0)
    take_steps(torchcaps.create_model("capsnet_small"), 2, 1)  # what torch loads and keeps in any case
    before = resident_peak()
    take_steps(*build(case), 2)
    return resident_peak() - before


def compare(case: str) -> dict[str, Any]:
    with torch.device("meta"):
        model, batch = build(case)
    estimated = estimate_memory(model, batch)
    command = [sys.executable, "-m", "benchmarks.training_memory", "--measure", case]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode:
        raise RuntimeError(f"measuring {case} failed:\n{run.stderr}")
    measured = int(run.stdout)
    return {
        "case": case,
        "estimated_bytes": estimated.total,
        "measured_bytes": measured,
        "ratio": estimated.total / measured,
        "vote_bytes": estimated.votes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="MODEL:BATCH[:WAY]", help=f"WAY is one of {', '.join(WAYS)}")
    parser.add_argument("--measure", metavar="CASE", help="measure one case in this process and print the bytes")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/bench/training_memory.json", help="where the JSON goes"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.measure))
        return
    for case in arguments.cases:
        name, batch, way = [*case.split(":"), "", ""][:3]
        if name not in torchcaps.list_models() or not batch.isdigit() or (way and way not in WAYS):
            parser.error(f"{case!r} is not MODEL:BATCH or MODEL:BATCH:WAY, as in tsai2020_cifar10:32:streamed")
    table = Table(box=box.SIMPLE_HEAD, title="memory to train, above a process that has loaded torch")
    for heading in ("model, batch, votes", "votes", "told", "measured", "told / measured"):
        table.add_column(heading, justify="left" if heading.startswith("model") else "right")
    rows = []
    cases = arguments.cases or CASES
    for case in track(cases, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        row = compare(case)
        rows.append(row)
        sizes = [row["vote_bytes"], row["estimated_bytes"], row["measured_bytes"]]
        table.add_row(
            case.replace(":", ", "), *(f"{size / MEBIBYTE:,.0f} MiB" for size in sizes), f"{row['ratio']:.2f}"
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    write_record(arguments.out, "benchmarks.training_memory", rows)


if __name__ == "__main__":
    main()
