"""What a routing is: a frozen choice, a step, and one loop for all of them.

A new routing is one file in this folder with one subclass of `Routing`. Registering is what subclassing does.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps._core.registry import check_name
from torchcaps._core.serialize import polymorphic
from torchcaps._core.validation import check_field_names, check_fields
from torchcaps.capsules import Capsules, register_pytree
from torchcaps.votes import Votes, Wiring

__all__ = ["Coefficient", "Geometry", "Routing", "State", "Trace", "iterate"]


class State(NamedTuple):
    """What a routing knows after a step.

    Shapes:
        pose ``[B, *L, J, D]``, activation ``[B, *L, J]``, coupling and logits ``[B, *L, I, J]``;
        memory: whatever else the routing's next step needs.
    """

    pose: Tensor | None = None
    activation: Tensor | None = None
    coupling: Tensor | None = None
    logits: Tensor | None = None
    memory: Any = None

    def capsules(self) -> Capsules:
        """Return the parents as they stand."""
        if self.pose is None:
            raise ValueError("this routing has not taken a step yet, so there are no parents")
        return Capsules(self.pose, self.activation)


class Trace(NamedTuple):
    """The states after every iteration, for analyses."""

    states: tuple[State, ...]

    @property
    def couplings(self) -> tuple[Tensor | None, ...]:
        """The couplings of every iteration, ``[B, *L, I, J]`` each."""
        return tuple(state.coupling for state in self.states)

    @property
    def logits(self) -> tuple[Tensor | None, ...]:
        """The logits of every iteration, where the routing has them."""
        return tuple(state.logits for state in self.states)


register_pytree(State, "torchcaps.routing.State")
register_pytree(Trace, "torchcaps.routing.Trace")


@dataclass(frozen=True)
class Geometry:
    """The sizes of a layer, by the letters of `torchcaps.capsules`.

    Args:
        slots: ``I``. parents: ``J``. dim: ``D``. rows: ``A``. columns: ``X``, of what a slot reads.
        types, child_dim: ``N`` and ``K`` of the children. reads: children that one slot reads.
        sites: ``*L``; ``None`` where it depends on an input that is not known yet.
    """

    slots: int
    parents: int
    dim: int
    rows: int
    columns: int
    types: int
    child_dim: int
    reads: int = 1
    sites: tuple[int, ...] | None = ()

    def size(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a coefficient with these axes: ``("L", "I", "J")`` and the like."""
        if "L" in axes and self.sites is None:
            raise ValueError(
                "grid must be given: this routing keeps coefficients for every output position, so it needs to "
                "know the children's grid, as in ConvCapsules(..., grid=(6, 6))"
            )
        known = {"I": (self.slots,), "J": (self.parents,), "D": (self.dim,), "L": self.sites or ()}
        return tuple(length for axis in axes for length in known[axis])


@dataclass(frozen=True)
class Coefficient:
    """A tensor that a routing owns.

    Args:
        axes: letters of its axes: ``"L"`` (the parents' grid), ``"I"``, ``"J"``, ``"D"``.
        init: its first value: a number, or a function that fills a tensor in place.
        learned: whether gradient descent moves it. Otherwise it is kept as a buffer.
        dtype: by default that of the layer's weights.
    """

    axes: tuple[str, ...]
    init: float | Callable[[Tensor], object] = 0.0
    learned: bool = True
    dtype: torch.dtype | None = None

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor the first value."""
        if callable(self.init):
            self.init(tensor)
        else:
            tensor.fill_(self.init)


REGISTRY: dict[str, type["Routing"]] = {}


@polymorphic
@dataclass(frozen=True)
class Routing:
    """A routing algorithm: how parents come out of votes. Subclasses are frozen dataclasses, one file each.

    Class attributes:
        paper, equation: where it comes from.
        couples: the axis over which couplings sum to 1: ``"parents"``, ``"children"`` or ``None``.
        slots, competition: how the layer wires children to votes; see `torchcaps.votes.Wiring`.
        vote_bias: whether votes have a bias for each slot and parent.
        iterations: steps of the loop; iterative algorithms make it a field.
        presence: what tells that a parent is there: its ``"length"``, its ``"normalized"`` length (over ``sqrt(D)``),
            its ``"activation"``, or ``None``: nothing does, and a model needs a classifier on top.
        dropout: of the input capsules. residual: whether the children are added to the parents.
    """

    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    couples: ClassVar[Literal["parents", "children"] | None] = "parents"
    slots: ClassVar[Literal["capsule", "type"]] = "capsule"
    vote_bias: ClassVar[bool] = False
    presence: ClassVar[Literal["length", "normalized", "activation"] | None] = "length"
    # No annotations: algorithms that leave these to their user declare them as fields.
    competition = "local"
    iterations = 1
    dropout = 0.0
    residual = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.step is Routing.step:
            return  # not an algorithm yet: something that algorithms share
        known = REGISTRY.get(cls.name())
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"a routing named {cls.name()!r} exists already, in {known.__module__}")
        REGISTRY[cls.name()] = cls

    def __post_init__(self) -> None:
        check_fields(self)
        if self.iterations < 1:
            raise ValueError(f"{type(self).__name__}: iterations must be 1 or more, got {self.iterations}")

    @classmethod
    def name(cls) -> str:
        """Return the name in the registry: ``InvertedAttention`` is ``inverted_attention``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def wire(self, types: int, **geometry: Any) -> Wiring:
        """Wire children as this routing wants them: a dense layer's, or with a grid and a window."""
        return Wiring(types, slots=self.slots, competition=self.competition, **geometry)  # type: ignore[arg-type]

    # What the layer asks when it is built ------------------------------------------------------------------

    def check(self, geometry: Geometry) -> None:
        """Raise a `ValueError` that says why, where the mathematics does not allow this geometry."""

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Name the tensors that this routing owns in a layer."""
        return {}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Fill the transformation matrices ``[..., I, X, J, Y]`` as the paper or its code does."""
        weight.normal_(0, 0.1)  # Sabour 2017, the authors' code

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return a constant to add to the votes, broadcast to ``[*L, I, J, D]``."""
        return None

    # The algorithm -----------------------------------------------------------------------------------------

    def init(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules) -> State:
        """Return the state before the first step."""
        return State()

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Take step ``t`` of ``iterations``.

        Args:
            p: the routing's coefficients by name.
            votes: the votes of these children.
            children: the children themselves, as the layer was given them.
            state: the state after step ``t - 1``, or of `init`.
            t: 0 for the first step.
        """
        raise TypeError(f"{type(self).__name__} must define step()")


def iterate(
    routing: Routing, p: Mapping[str, Tensor], votes: Votes, children: Capsules, trace: bool = False
) -> tuple[Capsules, Trace]:
    """Run a routing to its end: the one loop. The trace is empty unless asked for."""
    state = routing.init(p, votes, children)
    states = []
    for t in range(routing.iterations):
        state = routing.step(p, votes, children, state, t)
        if trace:
            states.append(state)
    return state.capsules(), Trace(tuple(states))


def create_routing(name: str, **fields: Any) -> Routing:
    """Build a routing by its name in the registry.

    >>> create_routing("dynamic", iterations=2)
    Dynamic(iterations=2, gradient='full', leak=False, prior=False, bias=False)
    """
    cls = REGISTRY[check_name(name, REGISTRY, "routing")]
    check_field_names(cls, fields)
    return cls(**fields)


def as_routing(value: Routing | str, name: str = "routing") -> Routing:
    """Take a routing, or the name of one with its default fields."""
    if isinstance(value, str):
        return create_routing(value)
    if not isinstance(value, Routing):
        kind = value.__name__ + ", a class: call it" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be a Routing such as Dynamic(3), or the name of one, got {kind}")
    if type(value).step is Routing.step:
        raise TypeError(f"{name} must be an algorithm, and {type(value).__name__} defines no step()")
    return value
