"""Base class of routing algorithms, their state and trace, and the iteration loop that all of them share.

A new routing is one file in this package with one subclass of `Routing`; subclassing registers it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps._core.registry import Registry
from torchcaps._core.serialize import polymorphic
from torchcaps._core.validation import check_field_names, check_fields, check_range
from torchcaps.capsules import Capsules, register_pytree
from torchcaps.votes import Votes, Wiring

__all__ = ["ROUTINGS", "Coefficient", "Geometry", "Routing", "State", "Trace", "run_routing", "vote_limit"]

# Largest votes, whose third powers are finite, and largest gradients, with room for sums, by dtype.
MAX_VOTE = {torch.float32: 1e10, torch.bfloat16: 1e10, torch.float64: 1e90}
MAX_GRADIENT = {torch.float32: 1e35, torch.bfloat16: 1e35, torch.float64: 1e300}
MIN_VOTE_LIMIT = 1e3  # votes that any routing accepts


class State(NamedTuple):
    """State of a routing algorithm after an iteration.

    Shapes:
        pose ``[B, *L, J, D]``, activation ``[B, *L, J]``, coupling and logits ``[B, *L, I, J]``;
        memory: anything else that the next step needs.

    >>> import torch
    >>> state = State(pose=torch.randn(2, 10, 16))
    >>> state.capsules().pose.shape
    torch.Size([2, 10, 16])
    """

    pose: Tensor | None = None
    activation: Tensor | None = None
    coupling: Tensor | None = None
    logits: Tensor | None = None
    memory: Any = None

    def capsules(self) -> Capsules:
        """Return the parents of this iteration."""
        if self.pose is None:
            raise ValueError("the state has no parents: call step() before capsules()")
        return Capsules(self.pose, self.activation)


class Trace(NamedTuple):
    """The states after every iteration.

    >>> import torch, torchcaps
    >>> parents, trace = torchcaps.route(torch.randn(2, 6, 5, 4), "dynamic", trace=True)
    >>> len(trace.states), trace.couplings[0].shape
    (3, torch.Size([2, 6, 5]))
    """

    states: tuple[State, ...]

    @property
    def couplings(self) -> tuple[Tensor | None, ...]:
        """The couplings of every iteration, ``[B, *L, I, J]`` each."""
        return tuple(state.coupling for state in self.states)

    @property
    def logits(self) -> tuple[Tensor | None, ...]:
        """The logits of every iteration, ``None`` if the routing has none."""
        return tuple(state.logits for state in self.states)


register_pytree(State, "torchcaps.routing.State")
register_pytree(Trace, "torchcaps.routing.Trace")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a capsule layer, by the axis letters of `torchcaps.capsules`.

    Args:
        slots: number of vote slots ``I``.
        parents: number of parents (dense) or parent types (convolutional) ``J``.
        dim: size of a parent's pose ``D``.
        rows: rows ``A`` of a pose viewed as a matrix.
        columns: columns ``X`` of the input of a slot.
        types, child_dim: ``N`` and ``K`` of the children.
        children_per_slot: number of children that one slot reads.
        sites: grid of the parents ``*L``; ``None`` if it depends on an input that is not known yet.
        shared: whether all children share one transformation matrix per parent.

    >>> geometry = Geometry(slots=32, parents=10, dim=16, rows=1, columns=8, types=32, child_dim=8)
    >>> geometry.size(("I", "J"))
    (32, 10)
    """

    slots: int
    parents: int
    dim: int
    rows: int
    columns: int
    types: int
    child_dim: int
    children_per_slot: int = 1
    sites: tuple[int, ...] | None = ()
    shared: bool = False

    def size(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a coefficient with the given axes, for example ``("L", "I", "J")``."""
        if "L" in axes and self.sites is None:
            raise ValueError(
                "grid must be given: this routing has coefficients for every output position, so it needs the "
                "children's grid, as in ConvCapsules(..., grid=(6, 6))"
            )
        known: dict[str, tuple[int, ...]]
        known = {"I": (self.slots,), "J": (self.parents,), "D": (self.dim,), "K": (self.child_dim,)}
        known["L"] = self.sites or ()
        return tuple(length for axis in axes for length in known[axis])


@dataclass(frozen=True)
class Coefficient:
    """Declaration of a tensor that a routing adds to its layer.

    Args:
        axes: letters of its axes: ``"L"`` (the parents' grid), ``"I"``, ``"J"``, ``"D"``, ``"K"``.
        init: initial value: a number, or a function that fills a tensor in place.
        learned: if True a parameter, trained by gradient descent; otherwise a buffer.
        dtype: data type; default: that of the layer's weights.

    >>> import torch
    >>> prior = Coefficient(("I", "J"), init=0.5)
    >>> tensor = torch.empty(3, 2)
    >>> prior.fill(tensor)
    >>> tensor.sum()
    tensor(3.)
    """

    axes: tuple[str, ...]
    init: float | Callable[[Tensor], object] = 0.0
    learned: bool = True
    dtype: torch.dtype | None = None

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor with the initial value."""
        if callable(self.init):
            self.init(tensor)
        else:
            tensor.fill_(self.init)


ROUTINGS: Registry[type["Routing"]] = Registry("routing", "torchcaps.routing")


@polymorphic(ROUTINGS.discover)
@dataclass(frozen=True)
class Routing:
    """Base class of routing algorithms, which compute parents from votes. Subclasses are frozen dataclasses.

    Class attributes:
        paper, equation: source of the algorithm, as printed.
        coupling_axis: the axis over which couplings sum to 1: ``"parents"``, ``"children"`` or ``None``.
        slot_kind, competition: how the layer wires children to votes; see `torchcaps.votes.Wiring`.
        vote_bias: whether votes have a bias per slot and parent.
        reads_children: whether the algorithm reads the poses of the children besides their votes.
        iterations: number of steps; iterative algorithms declare it as a field.
        presence: the quantity that indicates the presence of a parent: its ``"length"``, its ``"normalized"`` length
            (divided by ``sqrt(D)``), its ``"activation"``, or ``None`` if there is none and a model needs a classifier.
        dropout: dropout probability of the input capsules.
        residual: whether the children are added to the parents.
        approximate: whether results are those of a solver, up to its tolerance.

    >>> from torchcaps.routing import Dynamic
    >>> routing = Dynamic(iterations=2)
    >>> isinstance(routing, Routing), routing == Dynamic(iterations=2), routing.paper
    (True, True, 'Sabour 2017')
    """

    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    coupling_axis: ClassVar[Literal["parents", "children"] | None] = "parents"
    slot_kind: ClassVar[Literal["capsule", "type"]] = "capsule"
    vote_bias: ClassVar[bool] = False
    reads_children: ClassVar[bool] = False
    approximate: ClassVar[bool] = False
    presence: ClassVar[Literal["length", "normalized", "activation"] | None] = "length"
    # Without annotation, so that algorithms can declare these as fields.
    competition = "local"
    iterations = 1
    dropout = 0.0
    residual = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.step is Routing.step:
            return  # an abstract base, not an algorithm
        ROUTINGS.register(cls.name(), cls, replace=_is_redefinition)

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "iterations", 1)

    @classmethod
    def name(cls) -> str:
        """Return the registered name: ``inverted_attention`` for ``InvertedAttention``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def wire(self, types: int, **geometry: Any) -> Wiring:
        """Return the wiring of a layer with this routing: dense, or convolutional if a grid and kernel are given."""
        return Wiring(types, slot_kind=self.slot_kind, competition=self.competition, **geometry)  # type: ignore[arg-type]

    # Called when a layer is built --------------------------------------------------------------------------

    def check(self, geometry: Geometry) -> None:
        """Raise a ValueError if the algorithm does not support this geometry."""

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the tensors that this routing adds to a layer, by name."""
        return {}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise the transformation matrices ``[..., I, X, J, Y]`` as in the paper or the authors' code."""
        weight.normal_(0, 0.1)  # Sabour 2017, the authors' code

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return a constant that is added to the votes, broadcast to ``[*L, I, J, D]``, or ``None``."""
        return None

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the largest magnitude of a vote for which results and gradients are finite; ``None``: no limit.

        Layers and `route` raise a `torchcaps._core.validation.DomainError`, a ValueError, for larger votes, estimated
        from the largest child and the largest weight. The default is `vote_limit`.
        """
        return vote_limit(dtype, self.iterations)

    def unclaimed(self) -> dict[str, str]:
        """Return the invariants that layers with this routing lack, by name of the check of `torchcaps.audit`.

        Each with its reason. The default derives them from the class attributes and fields.
        """
        reasons: dict[str, str] = {}
        if self.coupling_axis is None:
            reasons["coupling_sums"] = f"the couplings of {type(self).__name__} are not normalised"
        elif self.competition == "global":
            reasons["coupling_sums"] = "the couplings of a child sum to 1 over the parents at all positions"
        if getattr(self, "coordinates", False):
            reasons["translation_equivariance"] = "the position of each child is added to its votes"
        if self.approximate:
            reasons["batch_of_one"] = "results are those of a solver and equal up to its tolerance only"
        if self.residual:
            reasons["permutation_invariance"] = "each child is added to the parent of the same index"
        if self.presence is None:
            reasons["length_range"] = f"the length of a pose of {type(self).__name__} does not indicate presence"
        elif getattr(self, "activation", "sigmoid") == "logit":
            reasons["length_range"] = "activations are logits"
        return reasons

    # The algorithm -----------------------------------------------------------------------------------------

    def init(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules) -> State:
        """Return the state before the first step."""
        return State()

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Return the state after iteration ``t``.

        Args:
            coefficients: the routing's tensors by name.
            votes: the votes of the children.
            children: the input capsules of the layer.
            state: the state after iteration ``t - 1``, or the result of `init`.
            t: index of the iteration, starting at 0.
        """
        raise TypeError(f"{type(self).__name__} must define step()")

    def check_fixed_point(self) -> None:
        """Raise a ValueError if the iteration has no fixed point that `Equilibrium` can solve for."""
        if type(self).pack is Routing.pack:
            reason = "accumulates its logits" if self.iterations > 1 else "has no iterations"
            raise ValueError(f"Equilibrium: {type(self).__name__} has no fixed point to solve for: it {reason}")

    # For `Equilibrium` -----------------------------------------------------------------------------------------

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return the tensors of a state that the next step reads, from which `unpack` computes the parents.

        Defined by routings whose iteration can have a fixed point.
        """
        raise TypeError(f"{type(self).__name__} has no fixed point")

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these tensors: parents, and what the next step reads."""
        raise TypeError(f"{type(self).__name__} has no fixed point")

    def annotate(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State) -> State:
        """Return the last state of a trace, with diagnostics that are too expensive to compute without one."""
        return state


def vote_limit(dtype: torch.dtype, iterations: int, gain: float = 1.0) -> float | None:
    """Return the largest vote for which squares of sums, and gradients through all iterations, can't overflow.

    A gradient through an iteration is multiplied by two votes, at worst: if parents are tied, so that the softmax is
    not saturated, and votes cancel, so that squash and LayerNorm do not divide by them. The limit is 1e10 in float32
    and bfloat16 for up to 2 iterations, 1e7 for 3, 1e5 for 4, 8e3 for 5, and at least 1e3 for more, where such a tie
    could still overflow; in float64, 1e90 and the corresponding powers. float16 has no range for a limit that ordinary
    votes would not exceed, so it has none.

    Args:
        dtype: dtype of the votes.
        iterations: number of iterations that the gradient flows through.
        gain: largest derivative of the parents of one iteration by the sum of votes.

    >>> [f"{vote_limit(torch.float32, n):.0e}" for n in (1, 2, 3, 4, 5, 6)]
    ['1e+10', '1e+10', '1e+07', '1e+05', '8e+03', '2e+03']
    """
    if dtype not in MAX_VOTE:
        return None
    root = 1 / (2 * iterations - 1)
    by_gradient = MAX_GRADIENT[dtype] ** root * gain ** (-iterations * root)  # gain ** iterations can overflow
    return max(MIN_VOTE_LIMIT, min(MAX_VOTE[dtype], by_gradient))


def run_routing(
    routing: Routing, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, trace: bool = False
) -> tuple[Capsules, Trace]:
    """Run all iterations of a routing; return the parents and the trace (empty if ``trace`` is False).

    >>> import torch
    >>> from torchcaps.routing import Dynamic
    >>> from torchcaps.votes import DenseVotes, Wiring
    >>> votes = DenseVotes(torch.randn(2, 6, 5, 4), Wiring(6))
    >>> parents, trace = run_routing(Dynamic(), {}, votes, Capsules(torch.randn(2, 6, 8)))
    >>> parents.pose.shape
    torch.Size([2, 5, 4])
    """
    state = routing.init(coefficients, votes, children)
    states = []
    for t in range(routing.iterations):
        state = routing.step(coefficients, votes, children, state, t)
        if trace:
            if t == routing.iterations - 1:
                state = routing.annotate(coefficients, votes, children, state)
            states.append(state)
    return state.capsules(), Trace(tuple(states))


def _is_redefinition(old: type, new: type) -> bool:
    """Return whether a class replaces itself, as when its module is reloaded."""
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def create_routing(name: str, **fields: Any) -> Routing:
    """Create a routing by its registered name.

    >>> create_routing("kmeans", iterations=2)
    KMeans(iterations=2, similarity='dot')
    """
    cls = ROUTINGS.get(name)
    check_field_names(cls, fields)
    return cls(**fields)


def as_routing(value: Routing | str, name: str = "routing") -> Routing:
    """Return a routing; a name becomes the routing with its default fields.

    >>> as_routing("uniform")
    Uniform(over='parents')
    """
    if isinstance(value, str):
        return create_routing(value)
    if not isinstance(value, Routing):
        kind = value.__name__ + ", a class: create an instance" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be a Routing such as Dynamic(3), or its name, got {kind}")
    if type(value).step is Routing.step:
        raise TypeError(f"{name} must be a routing algorithm; {type(value).__name__} does not define step()")
    return value
