"""Base class of votes: the reductions of the vote tensor that routing algorithms are written with."""

import enum
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.votes.wiring import Wiring

__all__ = ["Attended", "Density", "Moments", "VotePath", "Votes"]


class VotePath(enum.Enum):
    """How a capsule layer computes with its votes."""

    STORED = "stored"
    """One tensor (`DenseVotes`)."""
    STREAMED_TORCH = "streamed by torch"
    """Recomputed in chunks by torch; single reductions may use the kernel."""
    STREAMED_KERNEL = "streamed by the compiled kernel"
    """Recomputed in registers by the compiled CPU kernel."""
    STREAMED_TRITON = "streamed by Triton kernels"
    """Recomputed in the registers of a GPU."""

    @property
    def is_streamed(self) -> bool:
        """Whether the votes are never stored as a whole."""
        return self is not VotePath.STORED


class Attended(NamedTuple):
    """Result of `Votes.attend`. Coupling and logits are ``None`` if the computation did not need to store them.

    Shapes:
        total ``[B, *L, J, D]``, coupling and logits ``[B, *L, I, J]``
    """

    total: Tensor
    coupling: Tensor | None
    logits: Tensor | None


class Density(NamedTuple):
    """Unnormalised logarithm of the density of a vote, ``constant_j - Σ_d scale_jd (v_ijd - mean_jd)²``.

    Shapes:
        constant ``[B, *L, J]``, mean and scale ``[B, *L, J, D]``
    """

    constant: Tensor
    mean: Tensor
    scale: Tensor


class Moments(NamedTuple):
    """Result of `Votes.fit`. Coupling and logits are ``None`` if the computation did not need to store them.

    Shapes:
        mass ``[B, *L, J]``; total, mean and squares ``[B, *L, J, D]``; coupling and logits ``[B, *L, I, J]``
    """

    mass: Tensor
    total: Tensor
    mean: Tensor
    squares: Tensor
    coupling: Tensor | None
    logits: Tensor | None


class Votes(ABC):
    """Votes ``v[b, *L, i, j, d]``: the prediction of the child in slot ``i`` for the pose of parent ``j``.

    Routing algorithms use these methods only and are independent of how votes are stored.
    `torchcaps.votes.dense.DenseVotes` is the reference implementation of each method.

    Args:
        wiring: the child that each slot reads, and the parents that compete for a child.
        shape: ``(B, *L, I, J, D)``.

    >>> import torch
    >>> from torchcaps.votes import DenseVotes, Wiring
    >>> votes = DenseVotes(torch.randn(2, 6, 5, 4), Wiring(6))
    >>> isinstance(votes, Votes), votes.shape
    (True, (2, 6, 5, 4))
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

    def sqnorm(self, like: Tensor) -> Tensor:
        """Return the squared length of each vote, ``|v_ij|²``.

        Shapes:
            ``-> [B, *L, I, J]``, in the dtype and on the device of ``like``
        """
        one = like.new_ones(()).expand(*self.shape[:-3], *self.shape[-2:])
        return self.sqdist(torch.zeros_like(one), one)

    def moments(self, coupling: Tensor, divisor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean ``mu_j = Σ_i c_ij v_ij / n_j`` and the sum of squared deviations ``Σ_i c_ij (v_ij - mu_j)²``.

        Args:
            coupling: ``[B, *L, I, J]``.
            divisor: ``n_j``, ``[B, *L, J]``; default: 1.

        Shapes:
            ``-> [B, *L, J, D], [B, *L, J, D]``
        """
        mean = self.sum(coupling)
        if divisor is not None:
            mean = mean / divisor.unsqueeze(-1)
        return mean, self.sqsum(coupling, mean)

    def attend_with_prior(self, query: Tensor, prior: Tensor) -> Attended:
        """Return `attend` with constants added to the couplings: ``Σ_i (c_ij + b_ij) v_ij``.

        Args:
            query: ``[B, *L, J, D]``.
            prior: ``[I, J]``, shared by all images and positions.
        """
        prior = prior.expand(self.shape[:-1])
        total, coupling, logits = self.attend(query)
        total = total + self.sum(prior)  # separately: couplings that all images share cost one matrix product
        return Attended(total, None if coupling is None else coupling + prior, logits)

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

    def fit(self, activation: Tensor, density: Density | None, least_mass: float) -> Moments:
        """Return sums of the votes with weights ``w_ij = a_i softmax_j(log density)``: E-step and M-step of EM.

        ``mass_j = Σ_i w_ij``, ``total_j = Σ_i w_ij v_ij``, ``mean_j = total_j / max(mass_j, least_mass)`` and
        ``squares_j = Σ_i w_ij (v_ij - mean_j)²``.

        Args:
            activation: of the children, ``[B, I]`` or ``[B, *G, N]``; padding has activation 0.
            density: couplings are uniform if it is ``None``.
            least_mass: lower bound of the divisor, for a parent that no child is assigned to.
        """
        if density is None:
            logits, coupling = None, self.uniform(activation)
        else:
            logits = density.constant.unsqueeze(-2) - self.sqdist(density.mean, density.scale)
            coupling = self.softmax(logits)
        weight = coupling * self.wiring.gather(activation).unsqueeze(-1)
        mass = weight.sum(-2)
        total = self.sum(weight)
        mean = total / mass.clamp_min(least_mass).unsqueeze(-1)
        return Moments(mass, total, mean, self.sqsum(weight, mean), coupling, logits)

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
