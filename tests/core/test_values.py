"""Checks of values: skipped where there is nothing to read, and one synchronisation per forward on an accelerator."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchcaps
from torchcaps._core import validation, values
from torchcaps._core.labels import split_labels
from torchcaps._core.validation import DomainError, check_finite, check_magnitude, check_non_negative
from torchcaps._core.values import deferred_checks, in_vmap_or_forward_mode, is_readable
from torchcaps.losses import MarginLoss
from torchcaps.models.registry import find_model
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Heinsen


class CountReads(TorchDispatchMode):
    """Count the operations that wait for an accelerator: reads of a single value."""

    def __init__(self) -> None:
        super().__init__()
        self.n_reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n_reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator."""
    for module in (values, validation):
        monkeypatch.setattr(module, "is_host", lambda device: False)


def test_values_inside_vmap_are_not_read() -> None:
    bad = torch.tensor([[1.0, torch.nan]])
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append((is_readable(x), in_vmap_or_forward_mode()))
        check_finite(x, "x")
        return x

    torch.vmap(run)(bad)
    torch.func.grad(lambda x: run(x).sum())(bad[0, :1])  # values of a gradient transform can be read
    assert seen == [(False, True), (True, False)]
    with pytest.raises(ValueError, match="1 NaN or infinite of 2"):
        torch.func.grad(lambda x: run(x).sum())(bad)


@pytest.mark.usefixtures("accelerator")
def test_deferred_checks_raise_the_first_error_at_the_end() -> None:
    nan, negative = torch.tensor([torch.nan, 1.0]), torch.tensor([0.5, -2.0])
    check_finite(nan, "outside")  # not read
    done = []

    def run_checks(error: Exception | None = None) -> None:
        with deferred_checks():
            check_finite(negative, "first")
            with deferred_checks():  # joins the outer one
                check_finite(nan, "second")
            check_non_negative(negative, "third")
            done.append(True)
            if error is not None:
                raise error

    with pytest.raises(ValueError, match=r"second must be finite, got 1 NaN or infinite of 2"):
        run_checks()
    with pytest.raises(KeyError):  # another error is not replaced
        run_checks(KeyError())
    assert len(done) == 2
    with pytest.raises(ValueError, match=r"third must not be negative, got -2"), deferred_checks():
        check_non_negative(negative, "third")
    with pytest.raises(DomainError, match=r"8\.0e\+30"), deferred_checks():
        check_magnitude(1e20, "votes", "pose", torch.full((2,), 4e15), torch.full((2,), -1e15), scale=2)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", ["capsnet_small", "hinton2018_smallnorb", "tsai2020_cifar10"])
def test_forward_on_an_accelerator_reads_no_value_per_layer(name: str) -> None:
    model = torchcaps.create_model(name, **find_model(name).spec.smoke_changes()).eval()
    images = torch.rand(2, *model.spec.image)
    with CountReads() as count:
        model(images)
    assert count.n_reads == 0  # the deferred checks are copied to the host as one tensor
    with torch.no_grad():
        next(model.front.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="must be finite"):
        model(images)


@pytest.mark.usefixtures("accelerator")
def test_checks_of_labels_and_masks_are_deferred() -> None:
    """Multi-hot labels, the classes of several objects and masks of Heinsen routing: no read within the context."""
    rows, pairs = torch.tensor([[0, 1, 1], [1, 0, 1]]), torch.tensor([[2, 1], [0, 2]])
    layer = DenseCapsules(4, 3, 2, 3, routing=Heinsen(mask=True))
    mask = dict(layer.named_buffers())["coefficients.mask"]
    good: dict[str, Callable[[], object]] = {
        "multi-hot": lambda: MarginLoss()(torch.rand(2, 3), rows.float()),
        "rows of objects": lambda: split_labels(rows, 3, 2),
        "indices of objects": lambda: split_labels(pairs, 3, 2),
        "mask": lambda: layer(torch.randn(2, 4, 3)),
    }
    for name, run in good.items():
        with deferred_checks(), CountReads() as count:
            run()
        assert count.n_reads == 0, name
    mask[1] = 0
    bad: dict[str, Callable[[], object]] = {
        "only 0 and 1, got 0.5": lambda: MarginLoss()(torch.rand(2, 3), rows * 0.5),
        "got an image with 1": lambda: split_labels(torch.tensor([[0, 1, 1], [1, 0, 0]]), 3, 2),
        "same class twice": lambda: split_labels(pairs.clamp(min=2), 3, 2),
        "got none for child 1": good["mask"],
    }
    for message, run in bad.items():
        for context in (deferred_checks, nullcontext):
            with pytest.raises(ValueError, match=message), context():
                run()
