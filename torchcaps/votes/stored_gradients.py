"""Squared deviations of stored votes with gradients by formula: fewer passes over the votes than autograd makes.

Autograd differentiates ``(v - mu)²`` by itself, in five passes per use and gradient. Here the deviations ``d = v - mu``
are saved once and shared by `MomentsStored` and the `SqDistStored` of the next iteration, and each gradient is one
product with them. With gradients enabled in backward (double backward) deviations are computed again, so that they can
be differentiated.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps._core.values import is_batched

__all__ = ["MomentsStored", "SqDistStored", "SqNormStored", "SqSumStored"]


def _deviations(votes: Tensor, mean: Tensor, saved: Tensor) -> Tensor:
    """Return ``v - mu``: the saved ones, or in double backward a function of votes and mean."""
    return votes - mean.unsqueeze(-3) if torch.is_grad_enabled() else saved


def _is_plain(*tensors: Tensor) -> bool:
    """Return whether values may be overwritten: not in double backward and not inside ``vmap``."""
    return not torch.is_grad_enabled() and not any(is_batched(tensor) for tensor in tensors)


def _sum_product(factor: Tensor, votes: Tensor, dim: int, power: int, offset: Tensor | None = None) -> Tensor:
    """Return the sum over an axis of ``factor * votes ** power``, or of ``(factor * votes + offset) * votes``.

    Factor and offset broadcast to the votes. At most one tensor of the votes' size is allocated.
    """
    product = factor * votes
    plain = _is_plain(product, votes, *([] if offset is None else [offset]))
    if offset is not None:
        product = product.add_(offset) if plain else product + offset
    if power == 2:
        product = product.mul_(votes) if plain else product * votes
    return product.sum(dim)


def _scaled(deviations: Tensor, factor: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return ``weight * (factor * deviations + offset)``, in memory that is allocated once."""
    product = factor * deviations
    if not _is_plain(product, weight, *([] if offset is None else [offset])):
        return weight * (product if offset is None else product + offset)
    return (product if offset is None else product.add_(offset)).mul_(weight)


class MomentsStored(torch.autograd.Function):
    """``mu_j = Σ_i c_ij v_ij / n_j`` and ``Σ_i c_ij (v_ij - mu_j)²``; also returns the deviations, without gradient."""

    @staticmethod
    def forward(votes: Tensor, coupling: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return mean, sum of squares and deviations."""
        weight = coupling.unsqueeze(-1)
        mean = _sum_product(weight, votes, -3, 1) / divisor.unsqueeze(-1)
        deviations = votes - mean.unsqueeze(-3)
        return mean, _sum_product(weight, deviations, -3, 2), deviations

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # type: ignore[override]
        """Save inputs, mean and deviations."""
        mean, _, deviations = output
        ctx.mark_non_differentiable(deviations)
        ctx.set_materialize_grads(False)  # no zeros of the votes' size for the deviations
        ctx.save_for_backward(*inputs, mean, deviations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the gradients of votes, coupling and divisor."""
        votes, coupling, divisor, mean, saved = ctx.saved_tensors
        mean_grad, squares_grad = (torch.zeros_like(mean) if g is None else g for g in gradients[:2])
        deviations = _deviations(votes, mean, saved)
        # The sum of squares depends on the mean by -2 Σ_i c_ij (v_ij - mu_j) = -2 (n_j - Σ_i c_ij) mu_j.
        excess = (divisor - coupling.sum(-2)).unsqueeze(-1)
        mean_grad = (mean_grad - 2 * squares_grad * excess * mean) / divisor.unsqueeze(-1)
        offset, slope = mean_grad.unsqueeze(-3), squares_grad.unsqueeze(-3)
        coupling_grad = _sum_product(slope, deviations, -1, 2, offset) + (mean_grad * mean).sum(-1).unsqueeze(-2)
        votes_grad = _scaled(deviations, 2 * slope, coupling.unsqueeze(-1), offset)
        return votes_grad, coupling_grad, -(mean_grad * mean).sum(-1)


class SqSumStored(torch.autograd.Function):
    """``Σ_i c_ij (v_ij - mu_j)²``."""

    @staticmethod
    def forward(votes: Tensor, coupling: Tensor, mean: Tensor, deviations: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum; the deviations are ``v_ij - mu_j``, without gradient."""
        return _sum_product(coupling.unsqueeze(-1), deviations, -3, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of votes, coupling and mean."""
        votes, coupling, mean, saved = ctx.saved_tensors
        deviations = _deviations(votes, mean, saved)
        coupling_grad = _sum_product(gradient.unsqueeze(-3), deviations, -1, 2)
        votes_grad = _scaled(deviations, 2 * gradient.unsqueeze(-3), coupling.unsqueeze(-1))
        return votes_grad, coupling_grad, -votes_grad.sum(-3), None


class SqDistStored(torch.autograd.Function):
    """``Σ_d w_jd (v_ijd - mu_jd)²``."""

    @staticmethod
    def forward(votes: Tensor, mean: Tensor, scale: Tensor, deviations: Tensor) -> Tensor:  # type: ignore[override]
        """Return the distances; the deviations are ``v_ij - mu_j``, without gradient."""
        return _sum_product(scale.unsqueeze(-3), deviations, -1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of votes, mean and scale."""
        votes, mean, scale, saved = ctx.saved_tensors
        deviations = _deviations(votes, mean, saved)
        scale_grad = _sum_product(gradient.unsqueeze(-1), deviations, -3, 2)
        votes_grad = _scaled(deviations, 2 * gradient.unsqueeze(-1), scale.unsqueeze(-3))
        return votes_grad, -votes_grad.sum(-3), scale_grad, None


class SqNormStored(torch.autograd.Function):
    """``|v_ij|²``."""

    @staticmethod
    def forward(votes: Tensor) -> Tensor:  # type: ignore[override]
        """Return the squared lengths."""
        return _sum_product(votes, votes, -1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the votes."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient of the votes."""
        (votes,) = ctx.saved_tensors
        return (2 * gradient).unsqueeze(-1) * votes
