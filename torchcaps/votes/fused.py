"""Reductions of streamed votes that compute couplings and sums in one pass of the compiled CPU kernel.

Each equals the definition in `torchcaps.votes.base.Votes`, which is used if the kernel does not support the layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcaps.capsules import disable_autocast
from torchcaps.votes import reductions
from torchcaps.votes.base import Attended, Chosen, Density, Moments, Votes
from torchcaps.votes.cpu.fit import Inputs
from torchcaps.votes.cpu.fused import ATTEND, CHOOSE, RESEMBLE
from torchcaps.votes.dense import DenseVotes
from torchcaps.votes.dispatch import ChunkPlan, kernel_supports
from torchcaps.votes.fitting import KernelFit, KernelFused, fit_is_supported
from torchcaps.votes.similarity import SIMILARITIES, Similarity, agreement, as_query
from torchcaps.votes.wiring import Wiring

__all__ = ["FusedVotes"]

Fused = tuple[Tensor, Tensor]  # sum and mass (empty if there is none) of each parent
FusedDefinition = Callable[[Votes, Mapping[str, Tensor]], Fused]


class FusedVotes(Votes):
    """Base class of streamed votes: the methods that the kernel computes in one pass.

    Args:
        wiring, shape: see `torchcaps.votes.base.Votes`.
        plan: parameters of the reductions.
        tensors: children, weight and bias.
        couplings: whether methods return couplings and logits, which the kernel does not store.
    """

    def __init__(
        self,
        wiring: Wiring,
        shape: tuple[int, ...],
        plan: ChunkPlan,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        couplings: bool,
    ) -> None:
        super().__init__(wiring, shape)
        self._plan = plan
        self._tensors = tensors
        self._couplings = couplings

    def _for_parents(self, tensor: Tensor) -> Tensor:
        """Broadcast to one vector per parent and image, ``[B, *L, J, D]``."""
        return tensor.expand(*self.shape[:-3], *self.shape[-2:])

    def attend_with_prior(self, query: Tensor, prior: Tensor) -> Attended:
        """Return ``Σ_i (c_ij + b_ij) v_ij``, in one pass if the kernel for CPUs supports the layer."""
        inputs = {"first": self._for_parents(query), "shared": prior.expand(self.shape[-3:-1])}
        if not self._fuses(inputs):
            return super().attend_with_prior(query, prior)

        def define(votes: Votes, found: Mapping[str, Tensor]) -> Fused:
            """Return the weighted sum of the votes by the definition in `Votes`, and an empty mass."""
            return Votes.attend_with_prior(votes, found["first"], found["shared"]).total, found["first"].new_empty(0)

        return Attended(self._fuse(ATTEND, define, inputs)[0], None, None)

    def attend_similar(
        self, center: Tensor, similarity: Similarity, least: float, squares: Tensor | None = None
    ) -> tuple[Attended, Tensor | None]:
        """Return the sum of the votes weighted by their similarity with the centers, in one pass if supported."""
        query, constant = as_query(self._for_parents(center), similarity, least)
        inputs = {"first": query, "constant": constant}
        if not self._fuses(inputs):
            return super().attend_similar(center, similarity, least, squares)

        def define(votes: Votes, found: Mapping[str, Tensor]) -> Fused:
            """Return the sum of the votes weighted by similarity, by definition, and an empty mass."""
            like = found["first"]
            lengths = votes.centered_sqnorm(like) if similarity == "pearson" else votes.sqnorm(like)
            logits = agreement(votes.dot(found["first"]), lengths, found.get("constant"), least)
            return votes.sum(votes.softmax(logits)), like.new_empty(0)

        total, _ = self._fuse(RESEMBLE, define, inputs, SIMILARITIES.index(similarity), least)
        return Attended(total, None, None), None

    def choose(self, pose: Tensor, activation: Tensor, classifier: Tensor, offset: Tensor) -> Chosen:
        """Return the sums of self-routing, in one pass if the kernel for CPUs supports the layer."""
        inputs = {
            "activation": activation.expand(self._tensors[0].shape[:-1]),
            "classifier": classifier.transpose(1, 2).contiguous(),  # [I, K, J]
            "shared": offset,
        }
        is_own = not torch.compiler.is_compiling() and pose is self._tensors[0]
        if not is_own or self.wiring.slot_kind != "capsule" or not self._fuses(inputs):
            return super().choose(pose, activation, classifier, offset)

        def define(votes: Votes, found: Mapping[str, Tensor]) -> Fused:
            """Return sum and mass of self-routing by the definition in `Votes`."""
            classifier = found["classifier"].transpose(1, 2)
            chosen = Votes.choose(votes, found["pose"], found["activation"], classifier, found["shared"])
            return chosen.total, chosen.mass

        total, mass = self._fuse(CHOOSE, define, inputs)
        return Chosen(total, mass, None, None)

    def fit(
        self,
        activation: Tensor,
        density: Density | None,
        least_mass: float,
        more_mass: float = 0.0,
        gain: Tensor | None = None,
    ) -> Moments:
        """Return the sums of EM; in one pass, without storing couplings, if the kernel for CPUs supports the layer."""
        activation = activation.expand(self._tensors[0].shape[:-1])  # the kernel reads whole tensors
        constant, center, scale = density or (None, None, None)
        if constant is not None and center is not None and scale is not None:
            constant = constant.expand(*self.shape[:-3], self.shape[-2])
            center, scale = self._for_parents(center), self._for_parents(scale)
        inputs: Inputs = (*self._tensors, activation, constant, center, scale, gain)
        if self._couplings or not fit_is_supported(self._plan, inputs):
            return super().fit(activation, density, least_mass, more_mass, gain)
        # a closure of self would keep the children alive
        rows, wiring = self._plan.rows, self.wiring
        streamed: Any = type(self)

        def define(
            stored: bool, pose: Tensor, weight: Tensor, bias: Tensor | None, activation: Tensor, *density: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Return mass, total, squares and gained sums of EM by the definition in `Votes`."""
            make = DenseVotes.make if stored else streamed
            votes = make(pose, weight, bias, rows, wiring)
            *parts, gain = density
            given = None if parts[0] is None else Density(*parts)
            found = Votes.fit(votes, activation, given, least_mass, more_mass, gain)
            gained = torch.zeros_like(found.mass) if found.gained is None else found.gained
            return found.mass, found.total, found.squares, gained

        masses = least_mass, more_mass
        with disable_autocast(self._tensors[0]):
            mass, total, squares, gained = KernelFit.apply(self._plan, masses, define, *inputs)  # type: ignore[misc]
            mean = total / (mass.clamp_min(least_mass) + more_mass).unsqueeze(-1)
        return Moments(mass, total, mean, squares, None, None, None if gain is None else gained)

    def _fuses(self, inputs: Mapping[str, Tensor | None]) -> bool:
        """Return whether the kernel computes couplings and sums in one pass: parents of one position compete."""
        given = [tensor for tensor in inputs.values() if tensor is not None]
        if torch.compiler.is_compiling() or self._couplings or not self.wiring.is_local:
            return False
        return kernel_supports(reductions.Attend, self.wiring, *self._tensors, *given)

    def _fuse(self, kind: int, define: FusedDefinition, inputs: Mapping[str, Tensor | None], *options: float) -> Fused:
        """Return sum and mass, computed by the kernel; ``define`` computes the same from votes and inputs."""
        named = dict(zip(("pose", "weight", "bias"), self._tensors, strict=True)) | dict(inputs)
        names, plan = tuple(named), self._plan
        streamed: Any = type(self)

        def of_tensors(stored: bool, *tensors: Tensor | None) -> Fused:
            found = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
            make = DenseVotes.make if stored else streamed
            return define(make(found["pose"], found["weight"], found.get("bias"), plan.rows, plan.wiring), found)

        with disable_autocast(self._tensors[0]):
            return KernelFused.apply(kind, plan, names, options, of_tensors, *named.values())  # type: ignore[return-value]
