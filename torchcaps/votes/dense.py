"""Stored votes: the vote transform with its gradients, and the reference implementation of every reduction.

The vote transform is ``v_ij = p_i W_ij + b_ij``. A child's pose is a matrix ``[A, X]`` (vector poses: one row), its
weight ``[X, Y]``, the vote ``[A, Y]``. A slot that reads several children concatenates them along ``X``, so that the
product sums over the window, as a convolution does.

Shapes:
    slots ``[B, *L, I, A, X]``, weight ``[I, X, J, Y]`` shared by all positions or ``[*L, I, X, J, Y]``,
    bias ``[I, J, D]`` or ``[*L, I, 1, D]``, votes ``[B, *L, I, J, D]`` with ``D = A * Y``.
"""

from typing import Self

import torch
from torch import Tensor

from torchcaps._core.values import in_vmap_or_forward_mode
from torchcaps.capsules import disable_autocast
from torchcaps.votes.base import Attended, Votes
from torchcaps.votes.stored_gradients import MomentsStored, SqDistStored, SqNormStored, SqSumStored
from torchcaps.votes.wiring import Wiring

__all__ = ["DenseVotes", "bias_gradient", "compute_votes", "concat_children", "slot_gradient", "weight_gradient"]


def concat_children(children: list[Tensor], rows: int) -> Tensor:
    """Concatenate the children that a slot reads: ``children_per_slot * [..., K] -> [..., A, children_per_slot * X]``.

    Here ``K = A * X`` for a single child.
    """
    matrices = [child.unflatten(-1, (rows, -1)) for child in children]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=-1)


def compute_votes(slots: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the votes ``[B, *L, I, J, D]`` of these slots.

    Positions are merged into the batch: an einsum whose ellipsis means different axes for its operands is not valid
    in ONNX.
    """
    if weight.dim() > 4:
        votes = torch.einsum("bliax,lixjy->blijay", slots.flatten(1, -4), weight.flatten(0, -5))
        votes = votes.unflatten(1, slots.shape[1:-3])
    else:
        votes = torch.einsum("siax,ixjy->sijay", slots.flatten(0, -4), weight).unflatten(0, slots.shape[:-3])
    votes = votes.flatten(-2)
    return votes if bias is None else votes + bias


def slot_gradient(gradient: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Return the gradient of the slots, given the gradient of the votes."""
    return torch.einsum("b...ijay,...ixjy->b...iax", gradient.unflatten(-1, (rows, -1)), weight)


def weight_gradient(gradient: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight (shared or per position), given the gradient of the votes."""
    gradient = gradient.unflatten(-1, (slots.shape[-2], -1))
    if weight.dim() > 4:
        return torch.einsum("b...iax,b...ijay->...ixjy", slots, gradient)
    return torch.einsum("siax,sijay->ixjy", slots.flatten(0, -4), gradient.flatten(0, -5))


def bias_gradient(gradient: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of the bias, given the gradient of the votes: the sum over the broadcast axes."""
    return gradient.sum_to_size(bias.shape)


class DenseVotes(Votes):
    """Votes stored as one tensor ``[B, *L, I, J, D]``.

    >>> import torch
    >>> votes = DenseVotes(torch.randn(2, 6, 5, 4), Wiring(6))
    >>> votes.sum(torch.full((2, 6, 5), 1 / 5)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(self, votes: Tensor, wiring: Wiring) -> None:
        super().__init__(wiring, tuple(votes.shape))
        self._votes = votes
        # Means, their and the votes' versions, and the deviations without gradient.
        self._recent: tuple[Tensor, tuple[int, int], Tensor] | None = None

    @classmethod
    def make(cls, pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> Self:
        """Compute the votes of children ``[B, I, K]`` or ``[B, *G, N, K]``; for the other shapes see the module."""
        read = wiring.gather(pose)
        children = [read] if wiring.slot_kind == "capsule" else list(read.unbind(-2))
        return cls(compute_votes(concat_children(children, rows), weight, bias), wiring)

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``."""
        return (coupling.unsqueeze(-1) * self._votes).sum(-3)

    def dot(self, query: Tensor) -> Tensor:
        """Return ``a_ij = <q_j, v_ij>``."""
        return (query.unsqueeze(-3) * self._votes).sum(-1)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Return ``Σ_i c_ij (v_ij - mu_j)²``."""
        if _has_plain_autograd():
            mean = self._for_parents(mean)
            return SqSumStored.apply(self._votes, coupling.expand(self.shape[:-1]), mean, self._deviations(mean))
        return (coupling.unsqueeze(-1) * (self._votes - mean.unsqueeze(-3)) ** 2).sum(-3)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return ``Σ_d w_jd (v_ijd - mu_jd)²``."""
        if _has_plain_autograd():
            mean = self._for_parents(mean)
            return SqDistStored.apply(self._votes, mean, self._for_parents(scale), self._deviations(mean))
        return (scale.unsqueeze(-3) * (self._votes - mean.unsqueeze(-3)) ** 2).sum(-1)

    def sqnorm(self, like: Tensor) -> Tensor:
        """Return ``|v_ij|²``."""
        return SqNormStored.apply(self._votes) if _has_plain_autograd() else (self._votes * self._votes).sum(-1)

    def moments(self, coupling: Tensor, divisor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``mu_j = Σ_i c_ij v_ij / n_j`` and ``Σ_i c_ij (v_ij - mu_j)²``."""
        if not _has_plain_autograd():
            return super().moments(coupling, divisor)
        if divisor is None:
            divisor = self._votes.new_ones(()).expand(*self.shape[:-3], self.shape[-2])
        mean, squares, deviations = MomentsStored.apply(self._votes, coupling.expand(self.shape[:-1]), divisor)
        self._remember(mean, deviations)
        return mean, squares

    def attend_with_prior(self, query: Tensor, prior: Tensor) -> Attended:
        """Return ``Σ_i (c_ij + b_ij) v_ij`` in one sum."""
        logits = self.dot(query)
        coupling = self.softmax(logits) + prior
        return Attended(self.sum(coupling), coupling, logits)

    def _for_parents(self, tensor: Tensor) -> Tensor:
        """Broadcast to one vector per parent and image, ``[B, *L, J, D]``."""
        shape = (*self.shape[:-3], *self.shape[-2:])
        return tensor if tensor.shape == shape else tensor.expand(shape)

    def _deviations(self, mean: Tensor) -> Tensor:
        """Return ``v_ij - mu_j`` without gradient, the same tensor as before if the means are.

        A routing with Gaussian parents asks twice: for the variance, and in the next iteration for the distances.
        Tensors that were modified in place since, or may have been (inference mode), have new deviations.
        """
        recent = self._recent
        if recent is not None and recent[0] is mean and recent[1] == (mean._version, self._votes._version):
            return recent[2]
        deviations = self._votes.detach() - mean.detach().unsqueeze(-3)
        self._remember(mean, deviations)
        return deviations

    def _remember(self, mean: Tensor, deviations: Tensor) -> None:
        """Keep deviations for `_deviations`, with the versions of their tensors; not in inference mode."""
        if mean.is_inference() or self._votes.is_inference():  # they don't count their versions
            self._recent = None
        else:
            self._recent = mean, (mean._version, self._votes._version), deviations

    def mix(self, kernel: Tensor) -> Tensor:
        """Return ``Σ_md A_jimd v_mjd``."""
        with disable_autocast(self._votes):
            mixed = torch.einsum("jimd,smjd->sij", kernel, self._votes.flatten(0, -4))
            return mixed.unflatten(0, self._votes.shape[:-3])

    def dense(self) -> Tensor:
        """Return the tensor."""
        return self._votes

    def detach(self) -> Self:
        """Return the same votes without gradients."""
        return type(self)(self._votes.detach(), self.wiring)


def _has_plain_autograd() -> bool:
    """Return whether gradients by formula apply: not in a compiled graph, ``vmap`` or forward-mode differentiation."""
    return not torch.compiler.is_compiling() and not in_vmap_or_forward_mode()
