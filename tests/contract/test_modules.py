"""Every public module stands here with an example, or a test fails; the same is asked of all of them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from tests.tolerances import SAME, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.losses import ClassLoss, MarginLoss, MultiLabelLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import (
    CapsuleActivation,
    CapsuleLayer,
    CapsuleStack,
    ConvCapsules,
    Decoder,
    DenseCapsules,
    ExpSquash,
    PrimaryCapsules,
    Squash,
)

Example = tuple[nn.Module, tuple[Any, ...]]


def tensor(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def classes(n: int) -> Tensor:
    return torch.arange(n) % 3


# For a batch of n images: the module, and what it is called with, images first.
EXAMPLES: dict[type[nn.Module], Callable[[int], Example]] = {
    Squash: lambda n: (Squash(), (tensor(n, 3, 4),)),
    ExpSquash: lambda n: (ExpSquash(), (tensor(n, 3, 4),)),
    CapsuleActivation: lambda n: (CapsuleActivation(3, 4), (tensor(n, 5, 3, 4),)),
    PrimaryCapsules: lambda n: (PrimaryCapsules(2, 3, 4, 3, activations=True), (tensor(n, 2, 6, 6),)),
    DenseCapsules: lambda n: (DenseCapsules(6, 4, 3, 4, routing="em"), (tensor(n, 6, 4),)),
    ConvCapsules: lambda n: (ConvCapsules(2, 4, 3, 4, 3, routing="em"), (tensor(n, 5, 5, 2, 4),)),
    CapsuleStack: lambda n: (
        CapsuleStack([DenseCapsules(a, 4, b, 4, routing="inverted_attention") for a, b in [(6, 5), (5, 3)]]),
        (tensor(n, 6, 4),),
    ),
    Decoder: lambda n: (Decoder(3, 4, (1, 5, 5), hidden=(6,)), (tensor(n, 3, 4), classes(n))),
    MarginLoss: lambda n: (MarginLoss(), (tensor(n, 3), classes(n))),
    SpreadLoss: lambda n: (SpreadLoss(), (tensor(n, 3), classes(n))),
    ClassLoss: lambda n: (ClassLoss(), (tensor(n, 3), classes(n))),
    MultiLabelLoss: lambda n: (MultiLabelLoss(), (tensor(n, 3), classes(n))),
    ReconstructionLoss: lambda n: (ReconstructionLoss(), (tensor(n, 1, 5, 5), tensor(n, 1, 5, 5))),
}
ABSTRACT = {CapsuleLayer}

EVERY = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)


def example(kind: type[nn.Module], n: int) -> Example:
    torch.manual_seed(0)
    module, inputs = EXAMPLES[kind](n)
    return module.double().eval(), inputs


def parts(result: Any) -> list[Tensor]:
    return [part for part in (result if isinstance(result, Capsules) else [result]) if part is not None]


def test_every_public_module_has_an_example() -> None:
    public = {
        value
        for package in (torchcaps.nn, torchcaps.losses)
        for value in (getattr(package, name) for name in package.__all__)
        if isinstance(value, type) and issubclass(value, nn.Module)
    }
    assert public - ABSTRACT == set(EXAMPLES), "give every public module an example in tests/contract/test_modules.py"


@EVERY
def test_state_copy_and_pickle(kind: type[nn.Module]) -> None:
    module, inputs = example(kind, 4)
    expected = parts(module(*inputs))
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.add_(1)
    other.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        for found, value in zip(parts(twin(*inputs)), expected, strict=True):
            assert torch.equal(found, value)


@EVERY
def test_every_parameter_and_input_receives_a_finite_gradient(kind: type[nn.Module]) -> None:
    module, inputs = example(kind, 4)
    first = inputs[0].requires_grad_()
    result = parts(module(*inputs))
    sum((part * torch.rand_like(part)).sum() for part in result).backward()  # type: ignore[union-attr]
    for name, receiver in {"input": first, **dict(module.named_parameters())}.items():
        assert receiver.grad is not None, name
        assert bool(torch.isfinite(receiver.grad).all()), name
        assert float(receiver.grad.abs().max()) > 0, name


@EVERY
def test_zeros_are_finite_and_a_batch_of_one_works(kind: type[nn.Module]) -> None:
    module, inputs = example(kind, 1)
    zero = torch.zeros_like(inputs[0]).requires_grad_()
    result = parts(module(zero, *inputs[1:]))
    sum(part.sum() for part in result).backward()  # type: ignore[union-attr]
    assert all(bool(torch.isfinite(part).all()) for part in result)
    assert zero.grad is not None
    assert bool(torch.isfinite(zero.grad).all())


@EVERY
def test_images_do_not_see_each_other(kind: type[nn.Module]) -> None:
    """Losses are means over the batch; everything else keeps images apart."""
    module, inputs = example(kind, 4)
    together = parts(module(*inputs))
    alone = [parts(module(*(x[i : i + 1] for x in inputs))) for i in range(4)]
    for number, whole in enumerate(together):
        found = [one[number] for one in alone]
        if whole.dim() == 0:
            assert relative_rms(torch.stack(found).mean(), whole) < SAME[torch.float64]
        else:
            assert relative_rms(torch.cat(found), whole) < SAME[torch.float64]


@pytest.mark.parametrize("kind", [Decoder, PrimaryCapsules, MarginLoss, SpreadLoss], ids=lambda kind: kind.__name__)
def test_one_graph_under_compile(kind: type[nn.Module]) -> None:
    module, inputs = example(kind, 4)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for found, expected in zip(parts(compiled(*inputs)), parts(module(*inputs)), strict=True):
        assert relative_rms(found, expected) < SAME[torch.float64]
