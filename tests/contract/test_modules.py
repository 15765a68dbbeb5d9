"""Properties of every public module: state, copies, pickles, gradients, batch independence, compilation."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from tests.tolerances import SAME, assert_finite, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.losses import ClassLoss, MarginLoss, MultiLabelLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import (
    BranchMerge,
    CapsuleActivation,
    CapsuleLayer,
    CapsuleStack,
    ConvCapsules,
    Decoder,
    DenseCapsules,
    ExpSquash,
    HomogeneousCapsules,
    ImageDropout,
    PrimaryCapsules,
    ResidualCapsules,
    ShiftNorm,
    Squash,
    TransposedConvCapsules,
)

Example = tuple[nn.Module, tuple[Any, ...]]


def tensor(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def classes(n: int) -> Tensor:
    return torch.arange(n) % 3


# For a batch of n images: a module and its inputs, the differentiable one first.
EXAMPLES: dict[type[nn.Module], Callable[[int], Example]] = {
    Squash: lambda n: (Squash(), (tensor(n, 3, 4),)),
    ImageDropout: lambda n: (ImageDropout(), (tensor(n, 3, 4),)),
    ExpSquash: lambda n: (ExpSquash(), (tensor(n, 3, 4),)),
    CapsuleActivation: lambda n: (CapsuleActivation(3, 4), (tensor(n, 5, 3, 4),)),
    PrimaryCapsules: lambda n: (PrimaryCapsules(2, 3, 4, 3, activations=True), (tensor(n, 2, 6, 6),)),
    DenseCapsules: lambda n: (DenseCapsules(6, 4, 3, 4, routing="em"), (tensor(n, 6, 4),)),
    ConvCapsules: lambda n: (ConvCapsules(2, 4, 3, 4, 3, routing="em"), (tensor(n, 5, 5, 2, 4),)),
    CapsuleStack: lambda n: (
        CapsuleStack([DenseCapsules(a, 4, b, 4, routing="inverted_attention") for a, b in [(6, 5), (5, 3)]]),
        (tensor(n, 6, 4),),
    ),
    TransposedConvCapsules: lambda n: (
        TransposedConvCapsules(2, 4, 3, 4, 3, 2, 1, 1, routing="em"),
        (tensor(n, 3, 2, 2, 4),),
    ),
    ResidualCapsules: lambda n: (
        ResidualCapsules([DenseCapsules(6, 4, 6, 4, routing="dynamic") for _ in range(2)], momentum=0.5),
        (tensor(n, 6, 4),),
    ),
    HomogeneousCapsules: lambda n: (HomogeneousCapsules(3, (4, 2), 5), (tensor(n, 3, 4, 2),)),
    BranchMerge: lambda n: (BranchMerge(3), (tensor(n, 5, 3),)),
    ShiftNorm: lambda n: (ShiftNorm(3), (tensor(n, 5, 3),)),
    Decoder: lambda n: (Decoder(3, 4, (1, 5, 5), hidden=(6,)), (tensor(n, 3, 4), classes(n))),
    MarginLoss: lambda n: (MarginLoss(), (tensor(n, 3), classes(n))),
    SpreadLoss: lambda n: (SpreadLoss(), (tensor(n, 3), classes(n))),
    ClassLoss: lambda n: (ClassLoss(), (tensor(n, 3), classes(n))),
    MultiLabelLoss: lambda n: (MultiLabelLoss(), (tensor(n, 3), classes(n))),
    ReconstructionLoss: lambda n: (ReconstructionLoss(), (tensor(n, 1, 5, 5), tensor(n, 1, 5, 5))),
}
ABSTRACT = {CapsuleLayer}

EACH_MODULE = pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: cls.__name__)


def make_example(cls: type[nn.Module], n: int) -> Example:
    torch.manual_seed(0)
    module, inputs = EXAMPLES[cls](n)
    return module.double().eval(), inputs


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result, which may be capsules with or without activation."""
    return [tensor for tensor in (result if isinstance(result, Capsules) else [result]) if tensor is not None]


def test_every_public_module_has_an_example() -> None:
    public = {
        value
        for package in (torchcaps.nn, torchcaps.losses)
        for value in (getattr(package, name) for name in package.__all__)
        if isinstance(value, type) and issubclass(value, nn.Module)
    }
    assert public - ABSTRACT == set(EXAMPLES), "EXAMPLES must have an entry for every public module"


@EACH_MODULE
def test_state_dict_copy_and_pickle_preserve_results(cls: type[nn.Module]) -> None:
    module, inputs = make_example(cls, 4)
    expected = tensors(module(*inputs))
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.add_(1)
    other.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        torch.testing.assert_close(tensors(twin(*inputs)), expected, rtol=0, atol=0)


@EACH_MODULE
def test_every_parameter_and_input_receives_a_finite_gradient(cls: type[nn.Module]) -> None:
    module, inputs = make_example(cls, 4)
    first = inputs[0].requires_grad_()
    result = tensors(module(*inputs))
    sum((tensor * torch.rand_like(tensor)).sum() for tensor in result).backward()  # type: ignore[union-attr]
    for name, receiver in {"input": first, **dict(module.named_parameters())}.items():
        assert_finite(receiver.grad, name)
        assert float(receiver.grad.abs().max()) > 0, name


@EACH_MODULE
def test_zero_input_of_batch_size_one_is_finite(cls: type[nn.Module]) -> None:
    module, inputs = make_example(cls, 1)
    zero = torch.zeros_like(inputs[0]).requires_grad_()
    result = tensors(module(zero, *inputs[1:]))
    sum(tensor.sum() for tensor in result).backward()  # type: ignore[union-attr]
    for tensor in result:
        assert_finite(tensor)
    assert_finite(zero.grad, "gradient")


@EACH_MODULE
def test_images_of_a_batch_are_independent(cls: type[nn.Module]) -> None:
    """Losses are means over the batch; other modules compute each image separately."""
    module, inputs = make_example(cls, 4)
    batch = tensors(module(*inputs))
    singles = [tensors(module(*(x[i : i + 1] for x in inputs))) for i in range(4)]
    for expected, *images in zip(batch, *singles, strict=True):
        actual = torch.stack(images).mean() if expected.dim() == 0 else torch.cat(images)
        assert relative_rms(actual, expected) < SAME[torch.float64]


@pytest.mark.parametrize("cls", [Decoder, PrimaryCapsules, MarginLoss, SpreadLoss], ids=lambda cls: cls.__name__)
def test_compiles_to_one_graph(cls: type[nn.Module]) -> None:
    module, inputs = make_example(cls, 4)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(tensors(compiled(*inputs)), tensors(module(*inputs)), strict=True):
        assert relative_rms(actual, expected) < SAME[torch.float64]
