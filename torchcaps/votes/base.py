"""Base class of votes: the reductions of the vote tensor that routing algorithms are written with."""

import enum
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.votes.similarity import Similarity, agreement, as_query
from torchcaps.votes.wiring import Wiring

__all__ = ["Attended", "Chosen", "Density", "Moments", "VotePath", "Votes"]


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


class Chosen(NamedTuple):
    """Result of `Votes.choose`. Coupling and logits are ``None`` if the computation did not need to store them.

    Shapes:
        total ``[B, *L, J, D]``, mass ``[B, *L, J]``, coupling and logits ``[B, *L, I, J]``
    """

    total: Tensor
    mass: Tensor
    coupling: Tensor | None
    logits: Tensor | None


class Moments(NamedTuple):
    """Result of `Votes.fit`. Coupling and logits are ``None`` if the computation did not need to store them.

    Shapes:
        mass and gained ``[B, *L, J]``; total, mean and squares ``[B, *L, J, D]``; coupling and logits
        ``[B, *L, I, J]``
    """

    mass: Tensor
    total: Tensor
    mean: Tensor
    squares: Tensor
    coupling: Tensor | None
    logits: Tensor | None
    gained: Tensor | None = None


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

    def centered_sqnorm(self, like: Tensor) -> Tensor:
        """Return the squared length of each vote minus the mean of its elements; arguments as in `sqnorm`."""
        one = like.new_ones(()).expand(*self.shape[:-3], *self.shape[-2:])
        return (self.sqnorm(like) - self.dot(one) ** 2 / self.shape[-1]).clamp_min(0)

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

    def attend_similar(
        self, center: Tensor, similarity: Similarity, least: float, squares: Tensor | None = None
    ) -> tuple[Attended, Tensor | None]:
        """Return the sum ``Σ_i c_ij v_ij`` with couplings that are the softmax of a similarity of votes and centers.

        Args:
            center: ``[B, *L, J, D]``.
            similarity: see `torchcaps.votes.similarity`.
            least: least squared length of a vector and least divisor.
            squares: second result of an earlier call; computed if ``None``.

        Returns:
            The sum, and squared lengths of the votes for the next call, if they were needed.
        """
        query, constant = as_query(center, similarity, least)
        if squares is None:
            squares = self.centered_sqnorm(center) if similarity == "pearson" else self.sqnorm(center)
        logits = agreement(self.dot(query), squares, constant, least)
        coupling = self.softmax(logits)
        return Attended(self.sum(coupling), coupling, logits), squares

    def choose(self, pose: Tensor, activation: Tensor, classifier: Tensor, offset: Tensor) -> Chosen:
        """Return ``Σ_i a_i c_ij v_ij`` and ``Σ_i a_i c_ij`` with ``c_i = softmax_j(W2_ij p_i + beta_ij)``.

        Args:
            pose: of the children, ``[B, I, K]`` or ``[B, *G, N, K]``.
            activation: of the children; padding has activation 0.
            classifier: ``W2``, ``[I, J, K]``.
            offset: ``beta``, ``[I, J]``.
        """
        slots = self.wiring.gather(pose)  # [B, *L, I, K]
        logits = torch.einsum("sik,ijk->sij", slots.flatten(0, -3), classifier)
        logits = logits.unflatten(0, slots.shape[:-2]) + offset
        coupling = self.softmax(logits)
        weight = coupling * self.wiring.gather(activation).unsqueeze(-1)
        return Chosen(self.sum(weight), weight.sum(-2), coupling, logits)

    def fit(
        self,
        activation: Tensor,
        density: Density | None,
        least_mass: float,
        more_mass: float = 0.0,
        gain: Tensor | None = None,
    ) -> Moments:
        """Return sums of the votes with weights ``w_ij = a_i softmax_j(log density)``: E-step and M-step of EM.

        ``mass_j = Σ_i w_ij``, ``total_j = Σ_i w_ij v_ij``,
        ``mean_j = total_j / (max(mass_j, least_mass) + more_mass)``, ``squares_j = Σ_i w_ij (v_ij - mean_j)²`` and,
        given a gain, ``gained_j = Σ_i g_ij w_ij``.

        Args:
            activation: of the children, ``[B, I]`` or ``[B, *G, N]``; padding has activation 0.
            density: couplings are uniform if it is ``None``.
            least_mass: lower bound of the divisor, for a parent that no child is assigned to.
            more_mass: added to the divisor.
            gain: ``[I, J]``.
        """
        if density is None:
            logits, coupling = None, self.uniform(activation)
        else:
            logits = density.constant.unsqueeze(-2) - self.sqdist(density.mean, density.scale)
            coupling = self.softmax(logits)
        weight = coupling * self.wiring.gather(activation).unsqueeze(-1)
        mass = weight.sum(-2)
        divisor = mass.clamp_min(least_mass) + more_mass
        mean, squares = self.moments(weight, divisor)
        gained = None if gain is None else (gain * weight).sum(-2)
        return Moments(mass, mean * divisor.unsqueeze(-1), mean, squares, coupling, logits, gained)

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
