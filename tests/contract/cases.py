"""Cases of the contract suite: every routing, with every variant of its fields, in every kind of layer.

They are derived from the registry and the annotations of the fields, so a routing file added to the package is tested
without an edit here. By default tests run a seeded sample of the cases; see `tests.sampling`.
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
from tests.sampling import covering_sample
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
# For tests that compile: few positions and a small window, but padding and stride.
SMALL = {"dense": None, "conv_small": {"grid": (3, 2), "kernel_size": (2, 1), "stride": (2, 1), "padding": (1, 0)}}
POSES = ("vector", "matrix")

# The only combinations that a layer may reject, because they are not defined mathematically.
UNSUPPORTED = {
    ("em[coordinates=True]", "dense", "vector"),
    ("em[coordinates=True]", "dense", "matrix"),
    ("em[coordinates=True]", "conv_s1", "vector"),
    ("em[coordinates=True]", "conv_s2", "vector"),
    ("em[coordinates=True]", "conv_whole", "vector"),
    *(
        ("variational_bayes[coordinates=True]", geometry, pose)
        for geometry in GEOMETRIES
        for pose in POSES
        if geometry == "dense" or pose == "vector"
    ),
    ("attention[residual=True]", "conv_s2", "vector"),
    ("attention[residual=True]", "conv_s2", "matrix"),
    ("attention[residual=True]", "conv_whole", "vector"),
    ("attention[residual=True]", "conv_whole", "matrix"),
}


def variants(cls: type[Routing]) -> Iterator[tuple[str, Routing]]:
    """Yield the default, and each field changed on its own: each bool, each choice, 1 and 3 iterations."""
    default = cls()
    yield cls.name(), default
    for field in dataclasses.fields(cls):
        annotation, default_value = typing.get_type_hints(cls)[field.name], getattr(default, field.name)
        values: tuple[Any, ...] = ()
        if annotation is bool:
            values = (not default_value,)
        elif typing.get_origin(annotation) is Literal:
            values = typing.get_args(annotation)
        elif field.name == "iterations":
            values = (1, 3)
        for value in values:
            if value != default_value:
                yield (
                    f"{cls.name()}[{field.name}={value}]",
                    dataclasses.replace(default, **{field.name: value}),
                )


def pairs(cls: type[Routing]) -> Iterator[tuple[str, Routing]]:
    """Yield all combinations of two changed fields."""
    single = [(name, routing) for name, routing in variants(cls) if "[" in name]
    for (name, first), (second_name, second) in itertools.combinations(single, 2):
        changed = {f.name: getattr(second, f.name) for f in dataclasses.fields(cls)}
        changed = {key: value for key, value in changed.items() if value != getattr(cls(), key)}
        if all(getattr(first, key) == getattr(cls(), key) for key in changed):
            label = f"{name[:-1]},{second_name.split('[')[1]}"
            yield label, dataclasses.replace(first, **changed)


EXACT = [name for name in torchcaps.list_routings() if not REGISTERED.get(name).approximate]
ROUTINGS = dict(pair for name in EXACT for pair in variants(REGISTERED.get(name)))
PAIRS = dict(pair for name in EXACT for pair in pairs(REGISTERED.get(name)))
DEFAULTS = {name: REGISTERED.get(name)() for name in EXACT}


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
    def unsupported(self) -> bool:
        """Whether the layer must reject this combination."""
        routing, _, changes = self.name.partition("[")
        names = [f"{routing}[{change}]" for change in changes.removesuffix("]").split(",")] if changes else [routing]
        return any((name, self.geometry, self.pose) in UNSUPPORTED for name in names)

    @property
    def types(self) -> int:
        """Number of children: not that of the parents, to detect mix-ups, unless a residual needs it equal."""
        return PARENTS if self.routing.residual else (6 if self.geometry == "dense" else TYPES)

    @property
    def child_dim(self) -> int:
        """Pose size of the children: not that of the parents, unless matrices or a residual need it equal."""
        return DIM if self.pose == "matrix" or self.routing.residual else DIM - 1

    def options(self) -> dict[str, Any]:
        """Return the arguments of `ConvCapsules` besides the sizes."""
        options = dict((GEOMETRIES | SMALL)[self.geometry] or {})
        if self.routing.residual and self.geometry == "conv_s1":
            options["padding"] = "same"
        return options

    def layer(self, streamed: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0) -> CapsuleLayer:
        """Return the layer in eval mode, with weights large enough that couplings differ clearly from uniform."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
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
        return layer.eval()

    def children(self, dtype: torch.dtype = torch.float64, batch: int = BATCH, seed: int = 1) -> Capsules:
        generator = torch.Generator().manual_seed(seed)
        grid = () if self.geometry == "dense" else self.options()["grid"]
        shape = (batch, *grid, self.types)
        pose = torch.randn(*shape, self.child_dim, generator=generator, dtype=torch.float64)
        activation = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
        return Capsules(pose.to(dtype), activation.to(dtype))


def make_cases(routings: dict[str, Routing], geometries: Iterable[str] = GEOMETRIES) -> list[Case]:
    return [
        Case(name, routing, geometry, pose)  # type: ignore[arg-type]
        for name, routing in routings.items()
        for geometry in geometries
        for pose in POSES
    ]


ALL_CASES = make_cases(ROUTINGS)
CASES = [case for case in ALL_CASES if not case.unsupported]
DEFAULT_CASES = [case for case in make_cases(DEFAULTS) if not case.unsupported]
PAIR_CASES = [case for case in make_cases(PAIRS) if not case.unsupported]
SMALL_CASES = make_cases(DEFAULTS, SMALL)


def over(
    cases: list[Case], n: int | None = None, pairs: bool = True, seed: int = 0, **factors: dict[str, Any]
) -> pytest.MarkDecorator:
    """Parametrize a test by ``case`` and further arguments.

    Args:
        cases: the cases.
        n: size of the sample of the product. The sample contains each routing variant, and each algorithm with each
            combination of factors and with each geometry and pose, even if these are more than ``n``. Default: the
            product.
        pairs: False for expensive tests: the sample contains each geometry with each combination of factors, but not
            each variant.
        seed: seed of the sample.
        factors: for each further argument of the test its values, by name.
    """
    product = list(itertools.product(cases, *(values.items() for values in factors.values())))
    if n is not None:
        keys = [
            lambda row: row[0].name,
            lambda row: (row[0].name.partition("[")[0], *(name for name, _ in row[1:])),
            lambda row: (row[0].name.partition("[")[0], row[0].geometry, row[0].pose),
        ]
        if not pairs:
            keys = [lambda row: (row[0].geometry, *(name for name, _ in row[1:]))]
        product = covering_sample(product, n, keys, seed)
    rows = [(case, *(value for _, value in options)) for case, *options in product]
    ids = ["-".join([case.id, *(name for name, _ in options)]) for case, *options in product]
    return pytest.mark.parametrize(("case", *factors), rows, ids=ids)


def differentiable(layer: CapsuleLayer, children: Capsules) -> dict[str, torch.Tensor]:
    """Return the tensors to differentiate by: the children and all parameters, by name."""
    named = {f"children.{name}": tensor for name, tensor in children._asdict().items() if tensor is not None}
    return named | dict(layer.named_parameters())


def gradients(layer: CapsuleLayer, children: Capsules, seed: int = 5) -> dict[str, torch.Tensor]:
    """Return the gradients of a fixed random functional of pose and activation; zeros for unused tensors."""
    leaves = Capsules(*(None if x is None else x.clone().requires_grad_() for x in children))  # type: ignore[misc]
    parents = layer(leaves)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=parents.pose.dtype)
    for tensor in parents:
        if tensor is not None:
            # the same functional for every dtype
            direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            total = total + (tensor * direction).sum()
    named = differentiable(layer, leaves)
    results = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(named.items(), results, strict=True)}
