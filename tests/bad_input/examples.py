"""Layers and tensors to misuse, and what a refusal must be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchcaps.nn import ConvCapsules, Decoder, DenseCapsules
from torchcaps.routing import Dynamic

# What is called, the exception it must raise, and words that its message must have.
Refusal = tuple[Callable[[], Any], type[Exception], str]


def dense(**changes: Any) -> DenseCapsules:
    sizes = {"children": 6, "child_dim": 4, "parents": 3, "parent_dim": 4}
    return DenseCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def conv(**changes: Any) -> ConvCapsules:
    sizes = {"child_types": 2, "child_dim": 4, "parent_types": 3, "parent_dim": 4, "kernel_size": 3}
    return ConvCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def nan(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).index_fill(0, torch.tensor([0]), float("nan"))


def hot(*labels: int) -> torch.Tensor:
    return torch.tensor(labels)


pose, grid, images = torch.randn(2, 6, 4), torch.randn(2, 5, 5, 2, 4), torch.rand(2, 1, 6, 6)
scores = torch.rand(2, 3)
decoder = Decoder(3, 4, (1, 6, 6), hidden=(5,))


def check_refusal(refusal: Refusal) -> None:
    """One sentence, of the right kind, with the right words."""
    call, kind, message = refusal
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
