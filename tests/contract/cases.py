"""What the contract is held against: every routing, with every variant of its fields, in every kind of layer.

All of it is made from the registry and from the fields' own annotations, so a routing that is dropped into the
package is tested without a word here.
"""

import dataclasses
import itertools
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

import torchcaps
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS as REGISTERED

BATCH, TYPES, PARENTS, DIM = 2, 2, 3, 4
GEOMETRIES = {
    "dense": None,
    "conv_s1": {"grid": (4, 3), "kernel_size": 3, "stride": 1, "padding": 0},
    "conv_s2": {"grid": (6, 5), "kernel_size": 3, "stride": 2, "padding": "same"},  # padding (0, 1) and (1, 1)
    "conv_whole": {"grid": (3, 2), "kernel_size": (3, 2), "stride": 1, "padding": 0},
}
# For what takes a compiler seconds: few places, a small window, but padding and stride.
SMALL = {"dense": None, "conv_small": {"grid": (3, 2), "kernel_size": (2, 1), "stride": (2, 1), "padding": (1, 0)}}
POSES = ("vector", "matrix")

# Where the mathematics does not allow a routing, and nowhere else, a layer may refuse it.
REFUSALS = {
    ("em[coordinates=True]", "dense", "vector"),
    ("em[coordinates=True]", "dense", "matrix"),
    ("em[coordinates=True]", "conv_s1", "vector"),
    ("em[coordinates=True]", "conv_s2", "vector"),
    ("em[coordinates=True]", "conv_whole", "vector"),
    ("attention[residual=True]", "conv_s2", "vector"),
    ("attention[residual=True]", "conv_s2", "matrix"),
    ("attention[residual=True]", "conv_whole", "vector"),
    ("attention[residual=True]", "conv_whole", "matrix"),
}


def variants(cls: type[Routing]) -> Iterator[tuple[str, Routing]]:
    """The default, and every field changed by itself: each truth value, each choice, 1 and 3 iterations."""
    default = cls()
    yield cls.name(), default
    for field in dataclasses.fields(cls):
        kind, now = typing.get_type_hints(cls)[field.name], getattr(default, field.name)
        others: tuple[Any, ...] = ()
        if kind is bool:
            others = (not now,)
        elif typing.get_origin(kind) is Literal:
            others = typing.get_args(kind)
        elif field.name == "iterations":
            others = (1, 3)
        for value in others:
            if value != now:
                yield (
                    f"{cls.name()}[{field.name}={value}]",
                    dataclasses.replace(default, **{field.name: value}),
                )


def pairs(cls: type[Routing]) -> Iterator[tuple[str, Routing]]:
    """Every two fields changed at once."""
    single = [(name, routing) for name, routing in variants(cls) if "[" in name]
    for (name, one), (other_name, other) in itertools.combinations(single, 2):
        changed = {f.name: getattr(other, f.name) for f in dataclasses.fields(cls)}
        changed = {key: value for key, value in changed.items() if value != getattr(cls(), key)}
        if all(getattr(one, key) == getattr(cls(), key) for key in changed):
            label = f"{name[:-1]},{other_name.split('[')[1]}"
            yield label, dataclasses.replace(one, **changed)


ROUTINGS = dict(pair for name in torchcaps.list_routings() for pair in variants(REGISTERED.get(name)))
PAIRS = dict(pair for name in torchcaps.list_routings() for pair in pairs(REGISTERED.get(name)))
DEFAULTS = {name: REGISTERED.get(name)() for name in torchcaps.list_routings()}


@dataclass(frozen=True)
class Case:
    """One routing in one kind of layer."""

    name: str
    routing: Routing
    geometry: str
    pose: Literal["vector", "matrix"]

    @property
    def id(self) -> str:
        return f"{self.name}-{self.geometry}-{self.pose}"

    @property
    def refused(self) -> bool:
        kind, _, changes = self.name.partition("[")
        names = [f"{kind}[{change}]" for change in changes.removesuffix("]").split(",")] if changes else [kind]
        return any((name, self.geometry, self.pose) in REFUSALS for name in names)

    @property
    def types(self) -> int:
        """A residual wants as many children as parents; elsewhere they differ, so that mixing them up shows."""
        return PARENTS if self.routing.residual else (6 if self.geometry == "dense" else TYPES)

    @property
    def child_dim(self) -> int:
        """Square matrices and residuals keep the pose's size; elsewhere children have another than parents."""
        return DIM if self.pose == "matrix" or self.routing.residual else DIM - 1

    def options(self) -> dict[str, Any]:
        options = dict((GEOMETRIES | SMALL)[self.geometry] or {})
        if self.routing.residual and self.geometry == "conv_s1":
            options["padding"] = "same"
        return options

    def layer(self, streamed: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0) -> CapsuleLayer:
        """The layer in evaluation mode, with weights large enough that routing has something to decide."""
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            sizes = (self.types, self.child_dim, PARENTS, DIM)
            common: dict[str, Any] = {"routing": self.routing, "pose": self.pose, "streamed": streamed}
            layer = (
                DenseCapsules(*sizes, **common)
                if self.geometry == "dense"
                else ConvCapsules(*sizes, **self.options(), **common)
            )
            layer = layer.to(dtype)
            with torch.no_grad():
                layer.weight.normal_(0, 0.7)
                for tensor in [
                    *layer.coefficients.parameters(),
                    *([] if layer.bias is None else [layer.bias]),
                ]:
                    tensor.add_(0.3 * torch.randn(tensor.shape, dtype=dtype))
        finally:
            torch.set_rng_state(generator_state)
        return layer.eval()

    def children(self, dtype: torch.dtype = torch.float64, batch: int = BATCH, seed: int = 1) -> Capsules:
        generator = torch.Generator().manual_seed(seed)
        grid = () if self.geometry == "dense" else self.options()["grid"]
        shape = (batch, *grid, self.types)
        pose = torch.randn(*shape, self.child_dim, generator=generator, dtype=torch.float64)
        activation = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
        return Capsules(pose.to(dtype), activation.to(dtype))


def _all(routings: dict[str, Routing], geometries: Iterable[str] = GEOMETRIES) -> list[Case]:
    return [
        Case(name, routing, geometry, pose)  # type: ignore[arg-type]
        for name, routing in routings.items()
        for geometry in geometries
        for pose in POSES
    ]


EVERY_CASE = _all(ROUTINGS)
CASES = [case for case in EVERY_CASE if not case.refused]
DEFAULT_CASES = [case for case in _all(DEFAULTS) if not case.refused]
PAIR_CASES = [case for case in _all(PAIRS) if not case.refused]
SMALL_CASES = _all(DEFAULTS, SMALL)


def over(cases: list[Case]) -> pytest.MarkDecorator:
    """Run a test for each case."""
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def differentiable(layer: CapsuleLayer, children: Capsules) -> dict[str, torch.Tensor]:
    """Everything that a gradient can flow to, by name: the children and all parameters."""
    named = {f"children.{name}": tensor for name, tensor in children._asdict().items() if tensor is not None}
    return named | dict(layer.named_parameters())


def gradients(layer: CapsuleLayer, children: Capsules, seed: int = 5) -> dict[str, torch.Tensor]:
    """The gradients of a fixed random functional of pose and activation; zeros where there is none."""
    leaves = Capsules(*(None if x is None else x.clone().requires_grad_() for x in children))  # type: ignore[misc]
    parents = layer(leaves)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=parents.pose.dtype)
    for tensor in parents:
        if tensor is not None:
            # The same functional for every dtype.
            direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            total = total + (tensor * direction).sum()
    named = differentiable(layer, leaves)
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(named.items(), found, strict=True)}
