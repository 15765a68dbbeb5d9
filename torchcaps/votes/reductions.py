"""The reductions of `Votes` on a piece of the slots, each with its gradients.

All the streamed path knows of a reduction. ``sum`` and ``dot`` are each other's adjoint, and so are ``sqsum``
and ``sqdist``: what one computes forward is the gradient of the other's argument.

An argument or result that has a slot axis has it second to last, whatever it is: ``[B, *L, I, J]`` of a
coupling, ``[J, I, I, D]`` of a mixing kernel.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["ATTENDING", "BY_NAME", "Attend", "Dot", "Mix", "Reduction", "SqDist", "SqSum", "Sum"]


class Reduction:
    """One reduction: which of its arguments and whether its result go slot by slot.

    ``result(votes, *arguments)`` reduces a piece of the votes; where the result has no slot axis, the pieces' results
    add up. ``gradients(votes, gradient, *arguments)`` returns the gradients of the votes and of each argument, from
    the piece's share of the result's gradient.
    """

    slotted: ClassVar[tuple[bool, ...]]
    slotted_result: ClassVar[bool]
    of_parents: ClassVar[bool]  # whether the result is [B, *L, J, D] of parents, or [B, *L, I, J] of pairs
    result: ClassVar[Callable[..., Tensor]]
    gradients: ClassVar[Callable[..., tuple[Tensor, ...]]]


class Sum(Reduction):
    """``s_j = Σ_i c_ij v_ij``."""

    slotted = (True,)
    slotted_result = False
    of_parents = True

    @staticmethod
    def result(votes: Tensor, coupling: Tensor) -> Tensor:  # noqa: D102
        return torch.einsum("b...ij,b...ijd->b...jd", coupling, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, coupling: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return coupling.unsqueeze(-1) * gradient.unsqueeze(-3), Dot.result(votes, gradient)


class Dot(Reduction):
    """``a_ij = <q_j, v_ij>``."""

    slotted = (False,)
    slotted_result = True
    of_parents = False

    @staticmethod
    def result(votes: Tensor, query: Tensor) -> Tensor:  # noqa: D102
        return torch.einsum("b...jd,b...ijd->b...ij", query, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, query: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return gradient.unsqueeze(-1) * query.unsqueeze(-3), Sum.result(votes, gradient)


class SqSum(Reduction):
    """``Σ_i c_ij (v_ij - mu_j)²``."""

    slotted = (True, False)
    slotted_result = False
    of_parents = True

    @staticmethod
    def result(votes: Tensor, coupling: Tensor, mean: Tensor) -> Tensor:  # noqa: D102
        return Sum.result((votes - mean.unsqueeze(-3)) ** 2, coupling)

    @staticmethod
    def gradients(  # noqa: D102
        votes: Tensor, gradient: Tensor, coupling: Tensor, mean: Tensor
    ) -> tuple[Tensor, ...]:
        apart = votes - mean.unsqueeze(-3)
        of_votes = 2 * coupling.unsqueeze(-1) * gradient.unsqueeze(-3) * apart
        return of_votes, Dot.result(apart**2, gradient), -of_votes.sum(-3)


class SqDist(Reduction):
    """``Σ_d w_jd (v_ijd - mu_jd)²``."""

    slotted = (False, False)
    slotted_result = True
    of_parents = False

    @staticmethod
    def result(votes: Tensor, mean: Tensor, scale: Tensor) -> Tensor:  # noqa: D102
        return Dot.result((votes - mean.unsqueeze(-3)) ** 2, scale)

    @staticmethod
    def gradients(  # noqa: D102
        votes: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        apart = votes - mean.unsqueeze(-3)
        of_votes = 2 * gradient.unsqueeze(-1) * scale.unsqueeze(-3) * apart
        return of_votes, -of_votes.sum(-3), Sum.result(apart**2, gradient)


class Mix(Reduction):
    """``Σ_md A_jimd v_mjd``: the piece's slots are ``m``, the result's ``i`` are all of them."""

    slotted = (True,)
    slotted_result = False
    of_parents = False

    @staticmethod
    def result(votes: Tensor, kernel: Tensor) -> Tensor:  # noqa: D102
        return torch.einsum("jimd,b...mjd->b...ij", kernel, votes)

    @staticmethod
    def gradients(votes: Tensor, gradient: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        of_votes = torch.einsum("b...ij,jimd->b...mjd", gradient, kernel)
        of_kernel = torch.einsum("sij,smjd->jimd", gradient.flatten(0, -3), votes.flatten(0, -4))
        return of_votes, of_kernel


class Attend(Reduction):
    """``Σ_i c_ij v_ij`` with ``c_i = softmax_j <q_j, v_ij>``: `Dot`, softmax and `Sum` at once, no coupling kept."""

    slotted = (False,)
    slotted_result = False
    of_parents = True
    leak: ClassVar[bool] = False  # a competitor with a logit of 0 and no parent
    through: ClassVar[bool] = True  # whether a gradient flows through the couplings

    @classmethod
    def coupling(cls, votes: Tensor, query: Tensor) -> Tensor:  # noqa: D102
        logits = Dot.result(votes, query)
        if not cls.leak:
            return logits.softmax(-1)
        return torch.cat([torch.zeros_like(logits[..., :1]), logits], dim=-1).softmax(-1)[..., 1:]

    @classmethod
    def result(cls, votes: Tensor, query: Tensor) -> Tensor:  # noqa: D102
        return Sum.result(votes, cls.coupling(votes, query))

    @classmethod
    def gradients(cls, votes: Tensor, gradient: Tensor, query: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        coupling = cls.coupling(votes, query)
        of_votes, of_coupling = Sum.gradients(votes, gradient, coupling)
        if not cls.through:
            return of_votes, torch.zeros_like(query)
        shared = (coupling * of_coupling).sum(-1, keepdim=True)
        more, of_query = Dot.gradients(votes, coupling * (of_coupling - shared), query)
        return of_votes + more, of_query


class AttendLeaky(Attend):
    """With a place for none of the parents."""

    leak = True


class AttendFixed(Attend):
    """With couplings that are constants in backward."""

    through = False


class AttendLeakyFixed(AttendLeaky):
    """Both."""

    through = False


BY_NAME: dict[str, type[Reduction]] = {kind.__name__: kind for kind in (Sum, Dot, SqSum, SqDist, Mix)}
ATTENDING = {(kind.leak, kind.through): kind for kind in (Attend, AttendLeaky, AttendFixed, AttendLeakyFixed)}
BY_NAME |= {kind.__name__: kind for kind in ATTENDING.values()}
