"""Cost of data loading: augmentation compared with a training step, reading time, memory and throughput.

Requires the files of MNIST and CIFAR-10 (``torchcaps data get mnist``, ``torchcaps data get cifar10``, or the directory
that contains them in ``TORCHCAPS_DATA``). Everything runs on one thread; the best of several interleaved passes counts.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchcaps._core.machine import search_path_variables
from torchcaps.bench.timing import num_threads
from torchcaps.data import Batch, Loader, create_dataset
from torchcaps.models import create_model

__all__ = ["DATA_CASES", "measure_batch", "measure_data"]

BATCH_SIZE = 128
# (data set, pipeline, split, model); the models are built for the images of the data set
DATA_CASES = (
    ("mnist", "sabour2017.mnist", "train", "sabour2017_mnist"),
    ("mnist", "choi2019.mnist+official", "train", "sabour2017_mnist"),
    ("cifar10", "sabour2017.cifar10", "test", "sabour2017_mnist"),
    ("cifar10", "choi2019.cifar10+", "test", "sabour2017_mnist"),
    ("cifar10", "tsai2020.cifar10", "test", "sabour2017_mnist"),
    ("multimnist", "", "train", "sabour2017_multimnist"),
    ("diverse-multimnist", "", "train", "sabour2017_multimnist"),
)


def _training_step(name: str, batch: Batch) -> Callable[[], None]:
    """Return a function that trains a model for one step on a batch, with the optimizer of its recipe."""
    torch.manual_seed(0)
    model = create_model(name, image=tuple(batch.images.shape[1:]))
    loss, optimizer = model.loss(), model.recipe.optimizer.make(model.parameters())
    labels = batch.labels
    if labels.dtype.is_floating_point:  # multi-hot with any number of digits: the model takes two class indices
        labels = labels.topk(2, dim=1).indices

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch.images, labels), labels, batch.targets).backward()
        optimizer.step()

    return step


def _cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_batch(name: str, pipeline: str, split: str, model: str, repeat: int = 3) -> dict[str, Any]:
    """Compare the CPU time of loading and augmenting a batch with that of a training step on it."""
    loader = Loader(
        create_dataset(name, split, download=False), BATCH_SIZE, pipeline=pipeline, train=True, drop_last=True
    )
    step = _training_step(model, loader.batch(0, 0))
    loading, training = float("inf"), float("inf")
    for pass_index in range(repeat):
        for batch in range(20):
            index = (20 * pass_index + batch) % len(loader)
            loading = min(loading, _cpu_seconds(lambda index=index: loader.batch(0, index)))
        training = min(training, _cpu_seconds(step))
    return {
        "kind": "data",
        "case": f"{name}, {pipeline}" if pipeline else name,
        "model": model,
        "batch_seconds": loading,
        "step_seconds": training,
        "fraction": loading / training,
    }


def _mnist_read_seconds(repeat: int) -> float:
    """Return the wall time of reading all of MNIST from its gzipped files."""
    shortest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for split in ("train", "test"):
            create_dataset("mnist", split, download=False)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


MEMORY_SCRIPT = """
import torch
from torchcaps.bench.memory import peak_resident_bytes
from torchcaps.data import Loader, create_dataset

torch.set_num_threads(1)
before = peak_resident_bytes()
loaders = [Loader(create_dataset("mnist", split, download=False), 128, pipeline="sabour2017.mnist")
           for split in ("train", "test")]
for loader in loaders:
    for batch in loader.epoch(0):
        pass
print(peak_resident_bytes() - before)
"""


def _mnist_bytes() -> int:
    """Return the increase in peak memory of a process that reads MNIST and iterates over it once."""
    environment = {**os.environ, **search_path_variables()}
    command = [sys.executable, "-c", MEMORY_SCRIPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(run.stdout)


def _multimnist_images_per_second(repeat: int) -> float:
    """Return the throughput of the loader on MultiMNIST, whose images are generated on the fly."""
    loader = Loader(create_dataset("multimnist", download=False), BATCH_SIZE)
    best = 0.0
    for epoch in range(repeat):
        start = time.perf_counter()
        for index in range(100):
            loader.batch(epoch, index)
        best = max(best, 100 * BATCH_SIZE / (time.perf_counter() - start))
    return best


def measure_data(repeat: int = 3) -> Iterator[dict[str, Any]]:
    """Yield the record rows: one per case of `DATA_CASES`, then the totals of MNIST and MultiMNIST.

    Raises:
        DataError: if the files of MNIST or CIFAR-10 are missing.
    """
    create_dataset("mnist", download=False)
    create_dataset("cifar10", "test", download=False)
    with num_threads(1):
        for case in DATA_CASES:
            yield measure_batch(*case, repeat=repeat)
        yield {
            "kind": "data-total",
            "mnist_read_seconds": _mnist_read_seconds(repeat),
            "mnist_bytes": _mnist_bytes(),
            "multimnist_images_per_second": _multimnist_images_per_second(repeat),
        }
