"""Softmax over the parents of a child, faster than torch's where an axis is shorter than a vector register.

``torch.softmax`` on CPUs computes exponentials one by one if the last axis has fewer elements than a register has lanes
(16 in float32 with AVX-512, 8 with AVX2), and most capsule layers have few parents: it takes 3 to 5 times as long as
the operations below, forward, and 3 times backward.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps._core.values import in_vmap_or_forward_mode

__all__ = ["NarrowSoftmax", "is_narrow", "softmax_over_parents"]

MIN_ELEMENTS = 2**11  # below, the time is that of calling the operations
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


def softmax_over_parents(logits: Tensor) -> Tensor:
    """Return the softmax over the last axis.

    >>> logits = torch.randn(300, 10)
    >>> torch.allclose(softmax_over_parents(logits), logits.softmax(-1), atol=1e-6)
    True
    """
    return NarrowSoftmax.apply(logits) if is_narrow(logits) else logits.softmax(-1)  # type: ignore[return-value]


def is_narrow(logits: Tensor) -> bool:
    """Return whether torch's softmax would be slow: a CPU tensor with fewer parents than a register has lanes."""
    return (
        not torch.compiler.is_compiling()  # first: sizes can be symbolic
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.float64)
        and logits.shape[-1] < LANES
        and logits.numel() >= MIN_ELEMENTS
        and not in_vmap_or_forward_mode()
    )


class NarrowSoftmax(torch.autograd.Function):
    """Softmax over the last axis. Supports double backward and batched gradients."""

    @staticmethod
    def forward(logits: Tensor) -> Tensor:  # type: ignore[override]
        """Return the softmax."""
        powers = (logits - logits.amax(-1, keepdim=True)).exp_()
        return powers.div_(powers.sum(-1, keepdim=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the result."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return ``c (g - Σ c g)``."""
        (coupling,) = ctx.saved_tensors
        product = coupling * gradient
        return torch.addcmul(product, coupling, product.sum(-1, keepdim=True), value=-1)
