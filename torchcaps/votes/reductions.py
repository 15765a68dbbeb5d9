"""Reductions of `Votes` on a chunk of slots, each with its gradients: the definitions that streaming uses.

``sum`` and ``dot`` are adjoint to each other, and so are ``sqsum`` and ``sqdist``: the forward of one is the gradient
of the other's argument.

The slot axis of an argument or result, if any, is the second to last: ``[B, *L, I, J]`` for a coupling,
``[J, I, I, D]`` for a mixing kernel.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["ATTEND_VARIANTS", "BY_NAME", "Attend", "Dot", "Mix", "Reduction", "SqDist", "SqSum", "Sum", "kernel_index"]


class Reduction:
    """Base class of reductions.

    ``result(votes, *arguments)`` reduces a chunk of the votes; results without a slot axis are summed over chunks.
    ``gradients(votes, gradient, *arguments)`` returns the gradients of the votes and of each argument, given the
    gradient of the chunk's result.

    Class attributes:
        slotted: for each argument, whether it has a slot axis and is split into chunks.
        slotted_result: whether the result has a slot axis and is computed chunk by chunk.
        per_parent: whether the result is per parent, ``[B, *L, J, D]``, or per slot and parent, ``[B, *L, I, J]``.
    """

    slotted: ClassVar[tuple[bool, ...]]
    slotted_result: ClassVar[bool]
    per_parent: ClassVar[bool]
    result: ClassVar[Callable[..., Tensor]]
    gradients: ClassVar[Callable[..., tuple[Tensor, ...]]]


class Sum(Reduction):
    """``s_j = Σ_i c_ij v_ij``."""

    slotted = (True,)
    slotted_result = False
    per_parent = True

    @staticmethod
    def result(votes: Tensor, coupling: Tensor) -> Tensor:
        """Return the sum of the votes weighted by the coupling, ``[B, *L, J, D]``."""
        return torch.einsum("b...ij,b...ijd->b...jd", coupling, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, coupling: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes and coupling."""
        return coupling.unsqueeze(-1) * gradient.unsqueeze(-3), Dot.result(votes, gradient)


class Dot(Reduction):
    """``a_ij = <q_j, v_ij>``."""

    slotted = (False,)
    slotted_result = True
    per_parent = False

    @staticmethod
    def result(votes: Tensor, query: Tensor) -> Tensor:
        """Return the dot products of votes and query, ``[B, *L, I, J]``."""
        return torch.einsum("b...jd,b...ijd->b...ij", query, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, query: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes and query."""
        return gradient.unsqueeze(-1) * query.unsqueeze(-3), Sum.result(votes, gradient)


class SqSum(Reduction):
    """``Σ_i c_ij (v_ij - mu_j)²``."""

    slotted = (True, False)
    slotted_result = False
    per_parent = True

    @staticmethod
    def result(votes: Tensor, coupling: Tensor, mean: Tensor) -> Tensor:
        """Return the weighted sum of squared deviations from the mean, ``[B, *L, J, D]``."""
        return Sum.result((votes - mean.unsqueeze(-3)) ** 2, coupling)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, coupling: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes, coupling and mean."""
        deviation = votes - mean.unsqueeze(-3)
        votes_gradient = 2 * coupling.unsqueeze(-1) * gradient.unsqueeze(-3) * deviation
        return votes_gradient, Dot.result(deviation**2, gradient), -votes_gradient.sum(-3)


class SqDist(Reduction):
    """``Σ_d w_jd (v_ijd - mu_jd)²``."""

    slotted = (False, False)
    slotted_result = True
    per_parent = False

    @staticmethod
    def result(votes: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the scaled squared distances of votes to the mean, ``[B, *L, I, J]``."""
        return Dot.result((votes - mean.unsqueeze(-3)) ** 2, scale)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes, mean and scale."""
        deviation = votes - mean.unsqueeze(-3)
        votes_gradient = 2 * gradient.unsqueeze(-1) * scale.unsqueeze(-3) * deviation
        return votes_gradient, -votes_gradient.sum(-3), Sum.result(deviation**2, gradient)


class Mix(Reduction):
    """``Σ_md A_jimd v_mjd``: the chunk contains the slots ``m``; the result has all slots ``i``."""

    slotted = (True,)
    slotted_result = False
    per_parent = False

    @staticmethod
    def result(votes: Tensor, kernel: Tensor) -> Tensor:
        """Return the products of the kernel with the votes of the chunk, ``[B, *L, I, J]``."""
        return torch.einsum("jimd,b...mjd->b...ij", kernel, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes and kernel."""
        votes_gradient = torch.einsum("b...ij,jimd->b...mjd", gradient, kernel)
        kernel_gradient = torch.einsum("sij,smjd->jimd", gradient.flatten(0, -3), votes.flatten(0, -4))
        return votes_gradient, kernel_gradient


class Attend(Reduction):
    """``Σ_i c_ij v_ij`` with ``c_i = softmax_j <q_j, v_ij>``: `Dot`, softmax and `Sum` without storing couplings."""

    slotted = (False,)
    slotted_result = False
    per_parent = True
    leak: ClassVar[bool] = False  # whether to add a competitor with logit 0 and no parent
    through: ClassVar[bool] = True  # whether gradients flow through the couplings

    @classmethod
    def coupling(cls, votes: Tensor, query: Tensor) -> Tensor:
        """Return the couplings, softmax over the parents of ``<q_j, v_ij>``: ``[B, *L, I, J]``."""
        logits = Dot.result(votes, query)
        if not cls.leak:
            return logits.softmax(-1)
        return torch.cat([torch.zeros_like(logits[..., :1]), logits], dim=-1).softmax(-1)[..., 1:]

    @classmethod
    def result(cls, votes: Tensor, query: Tensor) -> Tensor:
        """Return the sum of the votes weighted by their couplings, ``[B, *L, J, D]``."""
        return Sum.result(votes, cls.coupling(votes, query))

    @classmethod
    def gradients(cls, votes: Tensor, gradient: Tensor, query: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of votes and query, the latter zero unless ``through``."""
        coupling = cls.coupling(votes, query)
        votes_gradient, coupling_gradient = Sum.gradients(votes, gradient, coupling)
        if not cls.through:
            return votes_gradient, torch.zeros_like(query)
        mean = (coupling * coupling_gradient).sum(-1, keepdim=True)
        through_logits, query_gradient = Dot.gradients(votes, coupling * (coupling_gradient - mean), query)
        return votes_gradient + through_logits, query_gradient


class AttendLeaky(Attend):
    """`Attend` with a competitor that has no parent."""

    leak = True


class AttendFixed(Attend):
    """`Attend` with couplings that are constants in backward."""

    through = False


class AttendLeakyFixed(AttendLeaky):
    """`Attend` with both."""

    through = False


ATTEND_VARIANTS = {(kind.leak, kind.through): kind for kind in (Attend, AttendLeaky, AttendFixed, AttendLeakyFixed)}
BY_NAME: dict[str, type[Reduction]] = {
    kind.__name__: kind for kind in (Sum, Dot, SqSum, SqDist, Mix, *ATTEND_VARIANTS.values())
}
_KERNEL_KINDS: tuple[type[Reduction], ...] = (Sum, Dot, SqSum, SqDist, Attend)  # the enum Kind in cpu/kernel.cpp


def kernel_index(reduction: type[Reduction]) -> int | None:
    """Return the index of a reduction in the compiled kernel's enum, or ``None`` if the kernel does not have it."""
    return next((index for index, kind in enumerate(_KERNEL_KINDS) if issubclass(reduction, kind)), None)
