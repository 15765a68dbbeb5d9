"""Base class of votes: the reductions of the vote tensor that routing algorithms are written with."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.votes.wiring import Wiring

__all__ = ["Attended", "Votes"]


class Attended(NamedTuple):
    """Result of `Votes.attend`. Coupling and logits are ``None`` if the computation did not need to store them.

    Shapes:
        total ``[B, *L, J, D]``, coupling and logits ``[B, *L, I, J]``
    """

    total: Tensor
    coupling: Tensor | None
    logits: Tensor | None


class Votes(ABC):
    """Votes ``v[b, *L, i, j, d]``: the prediction of the child in slot ``i`` for the pose of parent ``j``.

    Routing algorithms use these methods only and are independent of how votes are stored.
    `torchcaps.votes.dense.DenseVotes` is the reference implementation of each method.

    Args:
        wiring: the child that each slot reads, and the parents that compete for a child.
        shape: ``(B, *L, I, J, D)``.
    """

    def __init__(self, wiring: Wiring, shape: tuple[int, ...]) -> None:
        self.wiring = wiring
        self.shape = shape

    @abstractmethod
    def sum(self, coupling: Tensor) -> Tensor:
        """Return the sum weighted by the couplings, ``s_j = Σ_i c_ij v_ij``.

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
        """Return the weighted sum of squared deviations ``Σ_i c_ij (v_ij - mu_j)²``, per pose component.

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
        """Return one value per slot and parent, a linear combination of all votes for it: ``Σ_md A_jimd v_mjd``.

        Shapes:
            ``[J, I, I, D] -> [B, *L, I, J]``
        """

    def attend(self, query: Tensor, leak: bool = False, through: bool = True) -> Attended:
        """Return the sum ``Σ_i c_ij v_ij`` with couplings ``c_i = softmax_j <q_j, v_ij>``.

        Args:
            query: ``[B, *L, J, D]``.
            leak: see `softmax`.
            through: whether gradients flow through the couplings; otherwise they are constants.
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
        """Return the vote tensor ``[B, *L, I, J, D]``, for inspection; routing does not need it."""

    @abstractmethod
    def detach(self) -> Self:
        """Return the same votes without gradients."""

    def softmax(self, logits: Tensor, leak: bool = False) -> Tensor:
        """Normalise logits over the parents that compete for a child; see `Wiring.softmax`.

        Shapes:
            ``[B, *L, I, J] -> [B, *L, I, J]``
        """
        return self.wiring.softmax(logits, leak)

    def uniform(self, like: Tensor, leak: bool = False) -> Tensor:
        """Return the `softmax` of equal logits, as an expanded view.

        Shapes:
            ``-> [B, *L, I, J]``, in the dtype and on the device of ``like``.
        """
        return self.wiring.uniform_coupling(self.shape[-2], like, leak).expand(self.shape[:-1])
