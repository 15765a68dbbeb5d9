"""Memory estimate: close to the measured peak, by one run of the model on the meta device, and without side effects."""

import pytest
import torch

import torchcaps
from tests.models.narrow import STRUCTURES, narrow
from tests.sampling import covering_sample, sample
from torchcaps.bench.memory import TrainingCase, measure_training_peaks
from torchcaps.models import Network
from torchcaps.profiling import TrainingMemory, estimate_memory, summarize
from torchcaps.profiling.memory import AllocationRecorder, Heap

MEBIBYTE = 2**20

# Three kinds: dense capsules with a decoder, streamed convolutional capsules, a plain convolutional network.
MEASURED = {"sabour2017_mnist": 64, "tsai2020_cifar10": 64, "tsai2020_resnet18_cifar10": 32}


def estimated_bytes(name: str, batch_size: int) -> int:
    with torch.device("meta"):
        return estimate_memory(torchcaps.create_model(name), batch_size).total


@pytest.mark.parametrize("name", sample(MEASURED, 1, seed=1))
def test_estimate_is_within_a_quarter_of_the_measured_peak(name: str) -> None:
    estimated, case = estimated_bytes(name, MEASURED[name]), TrainingCase(name, MEASURED[name])
    measured = float("inf")
    for _ in range(3):  # the smallest counts: concurrent threads may fragment the heap
        measured = min(measured, measure_training_peaks({name: case})[name].training_bytes)
        if estimated / measured > 0.8:
            break
    assert 0.75 < estimated / measured < 1.25, f"{estimated / MEBIBYTE:.0f} MiB for {measured / MEBIBYTE:.0f} MiB"


@pytest.mark.parametrize("name", covering_sample(STRUCTURES, 8, [lambda name: type(narrow(name).spec).__name__]))
def test_parts_of_the_estimate(name: str) -> None:
    model = narrow(name)
    small, large = (estimate_memory(model, batch_size, streamed=False) for batch_size in (2, 8))
    assert type(small) is TrainingMemory
    assert small.weights >= 4 * model.n_parameters
    assert small.optimizer == 4 * model.recipe.optimizer.n_states * model.n_parameters
    assert small.step < large.step
    assert large.total > large.weights + large.optimizer
    assert large.votes == 4 * small.votes == 4 * 8 * summarize(model).votes


def test_model_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = narrow("tsai2020_cifar10")
    calls: list[Network] = []

    def counted(self: Network, *args: object, **kwargs: object) -> object:
        calls.append(self)
        return forward(self, *args, **kwargs)  # type: ignore[arg-type]

    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    forward = owner.forward
    monkeypatch.setattr(owner, "forward", counted)
    estimate_memory(model, 2)
    assert len(calls) == 1
    assert calls[0] is not model


def test_streaming_needs_less_memory() -> None:
    with torch.device("meta"):
        model = torchcaps.create_model("tsai2020_cifar10")
    stored, streamed = (estimate_memory(model, 8, streamed=option) for option in (False, True))
    assert stored.votes == streamed.votes == 4 * 8 * summarize(model).votes
    assert stored.step > stored.votes
    assert streamed.step < stored.votes / 4
    assert model.capsules.layers["caps1"].streamed == "auto"  # the model itself is unchanged


def test_estimate_does_not_change_the_model() -> None:
    model = narrow("choi2019_mnist").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate_memory(model, 4)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    assert not model.training
    assert model.capsules.layers["caps1"].votes_factory is None


def test_batch_size_is_checked() -> None:
    with pytest.raises(ValueError, match=r"batch_size.*0"):
        estimate_memory(narrow("capsnet_small"), 0)


def test_heap_reuses_holes_and_maps_large_blocks() -> None:
    heap = Heap()
    blocks = [heap.allocate(64_000) for _ in range(3)]
    heap.free(blocks[0])
    heap.free(blocks[1])  # merged into one hole of twice the size
    assert heap.n_bytes == 192_000
    heap.allocate(100_000)
    assert heap.n_bytes == 192_000  # fits into the hole
    heap.allocate(64_000)
    assert heap.n_bytes == 256_000  # does not fit into the rest
    large = heap.allocate(MEBIBYTE)
    assert heap.n_bytes == 256_000 + MEBIBYTE
    heap.free(large)  # mapped, so returned at once; from now on blocks of this size come from the heap
    assert heap.n_bytes == 256_000
    heap.free(heap.allocate(MEBIBYTE // 2))
    assert heap.n_bytes == 256_000 + MEBIBYTE // 2  # and are kept
    assert heap.peak == 256_000 + MEBIBYTE


def test_convolution_includes_the_copies_of_its_kernel() -> None:
    images = torch.empty(2, 3, 8, 8, device="meta")
    weight = torch.empty(5, 3, 3, 3, device="meta", requires_grad=True)
    recorder = AllocationRecorder()
    recorder.ignore(images)
    recorder.ignore(weight)
    with recorder:
        output = torch.nn.functional.conv2d(images, weight)
        n_forward = len(recorder.events)
        output.sum().backward()
    sizes = [size for _, size in recorder.events[:n_forward] if size is not None]
    y, x, w = 4 * 2 * 5 * 36, 4 * images.numel(), 4 * weight.numel()
    assert sizes == [y, x, w, y]  # the output, then copies of inputs and output
    assert [block for block, size in recorder.events[:n_forward] if size is None] == [2, 3, 4]
    assert [size for _, size in recorder.events[n_forward:] if size is not None][-3:] == [y, x, w]
