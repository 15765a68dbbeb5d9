"""What training takes of memory is told before it runs, and is what it then takes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcaps
from tests.models.narrow import STRUCTURES, narrow
from torchcaps.profiling.heap import Heap
from torchcaps.profiling.memory import Births, estimate_memory
from torchcaps.profiling.summary import summarize

ROOT = Path(__file__).resolve().parent.parent.parent
MEBIBYTE = 2**20


# Three kinds: dense capsules with a decoder, convolutional capsules that are streamed, a plain convolutional net.
@pytest.mark.parametrize(
    ("name", "batch"), [("sabour2017_mnist", 64), ("tsai2020_cifar10", 64), ("tsai2020_resnet18_cifar10", 32)]
)
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(name: str, batch: int) -> None:
    with torch.device("meta"):
        estimated = estimate_memory(torchcaps.create_model(name), batch).total
    command = [sys.executable, "-m", "benchmarks.training_memory", "--measure", f"{name}:{batch}"]
    measured = float("inf")
    for _ in range(3):  # the least counts: threads that meet in the heap at odd moments leave holes in it
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        measured = min(measured, int(run.stdout))
        if estimated / measured > 0.8:
            break
    assert 0.75 < estimated / measured < 1.25, f"{estimated / MEBIBYTE:.0f} MiB for {measured / MEBIBYTE:.0f} MiB"


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_kind_of_model_can_be_estimated(name: str) -> None:
    model = narrow(name)
    small, large = (estimate_memory(model, batch, streamed=False) for batch in (2, 8))
    assert small.weights >= 4 * model.n_parameters
    assert small.optimizer == 4 * model.recipe.optimizer.n_states * model.n_parameters
    assert small.step < large.step
    assert large.total > large.weights + large.optimizer
    assert large.votes == 4 * small.votes


def test_streaming_needs_less_and_the_estimate_knows() -> None:
    with torch.device("meta"):
        model = torchcaps.create_model("tsai2020_cifar10")
    stored, streamed = (estimate_memory(model, 8, streamed=way) for way in (False, True))
    assert stored.votes == streamed.votes == 4 * 8 * summarize(model).votes
    assert stored.step > stored.votes
    assert streamed.step < stored.votes / 4
    assert model.capsules.layers["caps1"].streamed == "auto"  # the model itself was not touched


def test_the_estimate_leaves_the_model_alone() -> None:
    model = narrow("choi2019_mnist").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate_memory(model, 4)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_the_heap_reuses_holes_and_maps_what_is_large() -> None:
    heap = Heap()
    blocks = [heap.take(64_000) for _ in range(3)]
    heap.give_back(blocks[0])
    heap.give_back(blocks[1])  # one hole of twice the size
    assert heap.held == 192_000
    heap.take(100_000)
    assert heap.held == 192_000  # it fitted
    heap.take(64_000)
    assert heap.held == 256_000  # what was left did not hold this
    large = heap.take(MEBIBYTE)
    assert heap.held == 256_000 + MEBIBYTE
    heap.give_back(large)  # mapped, so it is gone at once; from now on a block of this size comes from the heap
    assert heap.held == 256_000
    heap.give_back(heap.take(MEBIBYTE // 2))
    assert heap.held == 256_000 + MEBIBYTE // 2  # and its place stays
    assert heap.most == 256_000 + MEBIBYTE


def test_a_convolution_counts_with_the_copies_that_its_kernel_makes() -> None:
    images = torch.empty(2, 3, 8, 8, device="meta")
    weight = torch.empty(5, 3, 3, 3, device="meta", requires_grad=True)
    births = Births()
    births.ignore(images)
    births.ignore(weight)
    with births:
        output = torch.nn.functional.conv2d(images, weight)
        n_forward = len(births.events)
        output.sum().backward()
    sizes = [size for _, size in births.events[:n_forward] if size is not None]
    made, x, w = 4 * 2 * 5 * 36, 4 * images.numel(), 4 * weight.numel()
    assert sizes == [made, x, w, made]  # the output, then copies of what is read and written
    assert [name for name, size in births.events[:n_forward] if size is None] == [2, 3, 4]
    assert [size for _, size in births.events[n_forward:] if size is not None][-3:] == [made, x, w]


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must be 1 or more, got 0"):
        estimate_memory(narrow("capsnet_small"), 0)
