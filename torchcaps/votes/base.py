"""The votes of a capsule layer as an operator: the few reductions that routing needs of them."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.votes import competition
from torchcaps.votes.wiring import Wiring

__all__ = ["Attended", "Votes"]


class Attended(NamedTuple):
    """What parents see of the votes when they attend to them; couplings and logits only where they exist anyway.

    Shapes:
        total ``[B, *L, J, D]``, coupling and logits ``[B, *L, I, J]``
    """

    total: Tensor
    coupling: Tensor | None
    logits: Tensor | None


class Votes(ABC):
    """Votes ``v[b, *L, i, j, d]``: what the child in slot ``i`` says of the pose of parent ``j``.

    Routing algorithms are written against these methods and never see how votes are kept.
    `torchcaps.votes.dense.DenseVotes` defines each of them.

    Args:
        wiring: which child each slot reads, and which parents compete for a child.
        shape: ``(B, *L, I, J, D)``.
    """

    def __init__(self, wiring: Wiring, shape: tuple[int, ...]) -> None:
        self.wiring = wiring
        self.shape = shape

    @abstractmethod
    def sum(self, coupling: Tensor) -> Tensor:
        """Return the coupled sum ``s_j = Σ_i c_ij v_ij``.

        Shapes:
            ``[B, *L, I, J] -> [B, *L, J, D]``; the coupling may be broadcast.
        """

    @abstractmethod
    def dot(self, query: Tensor) -> Tensor:
        """Return the agreement ``a_ij = <q_j, v_ij>``.

        Shapes:
            ``[B, *L, J, D] -> [B, *L, I, J]``
        """

    @abstractmethod
    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Return the coupled sum of squares ``Σ_i c_ij (v_ij - mu_j)²``, for each of the ``D`` numbers.

        Shapes:
            ``[B, *L, I, J], [B, *L, J, D] -> [B, *L, J, D]``
        """

    @abstractmethod
    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the scaled squared distance ``Σ_d w_jd (v_ijd - mu_jd)²``.

        Shapes:
            ``[B, *L, J, D], [B, *L, J, D] -> [B, *L, I, J]``
        """

    @abstractmethod
    def mix(self, kernel: Tensor) -> Tensor:
        """Return one number for each slot and parent out of all votes for that parent: ``Σ_md A_jimd v_mjd``.

        Shapes:
            ``[J, I, I, D] -> [B, *L, I, J]``
        """

    def attend(self, query: Tensor, leak: bool = False, through: bool = True) -> Attended:
        """Return the sum ``Σ_i c_ij v_ij`` with couplings ``c_i = softmax_j <q_j, v_ij>``.

        Args:
            query: ``[B, *L, J, D]``.
            leak: see `softmax`.
            through: whether a gradient flows through the couplings; otherwise they are constants.
        """
        if through:
            logits = self.dot(query)
        else:
            with torch.no_grad():
                logits = self.dot(query)
        coupling = self.softmax(logits, leak)
        return Attended(self.sum(coupling), coupling, logits)

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the votes themselves, ``[B, *L, I, J, D]``: for looking at, not for routing."""

    @abstractmethod
    def detach(self) -> Self:
        """Return the same votes, through which no gradient flows."""

    def softmax(self, logits: Tensor, leak: bool = False) -> Tensor:
        """Normalise over the parents that compete for a child; with ``leak`` a place is kept for none of them.

        Shapes:
            ``[B, *L, I, J] -> [B, *L, I, J]``
        """
        return competition.softmax(logits, self.wiring, leak)

    def uniform(self, like: Tensor, leak: bool = False) -> Tensor:
        """Return what `softmax` makes of equal logits, as a view that takes no memory.

        Shapes:
            ``-> [B, *L, I, J]``, in the dtype and on the device of ``like``.
        """
        return competition.uniform(self.wiring, self.shape[-2], like, leak).expand(self.shape[:-1])
