"""Adversarial values for every routing in every kind of layer, on every path of the votes.

A case is a layer with random fields, sizes and weights, and a batch of images, each with its own pattern of values:
zeros, subnormal, tied, cancelling, huge, mixed scales. Inside the documented domain (`Routing.max_vote`), parents and
all gradients must be finite on each path; outside of it, each path must raise a `DomainError`. An evaluation is one
image on one path, forward and backward.
"""

import contextlib
import dataclasses
import math
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.harness import Case, Target
from torchcaps._core.serialize import from_plain, to_plain
from torchcaps._core.validation import DomainError
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules, TransposedConvCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS
from torchcaps.votes import dispatch

__all__ = ["LayerInput", "Layers", "draw_input", "draw_values", "evaluate_paths"]

LayerKind = Literal["dense", "conv", "transposed"]
BATCH = 64
PATHS = ("stored", "chunks", "kernel")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16)
SMALLEST = {torch.float32: -45.0, torch.float64: -323.0, torch.bfloat16: -40.0}  # exponents of subnormal numbers
LAYERS = {"dense": DenseCapsules, "conv": ConvCapsules, "transposed": TransposedConvCapsules}
PATTERNS = ("zero", "subnormal", "tiny", "constant", "normal", "single", "cancelling", "mixed", "rows", "huge")


@dataclasses.dataclass
class LayerInput:
    """A layer and its input, as plain values.

    Args:
        routing: the routing.
        kind: ``"dense"``, ``"conv"`` or ``"transposed"``.
        options: arguments of the layer besides routing and path.
        dtype: dtype of all tensors.
        tensors: the children's ``pose`` and ``activation`` (optional), and the layer's state by name.
        inside: whether the votes are inside the domain.
    """

    routing: Routing
    kind: LayerKind
    options: dict[str, Any]
    dtype: torch.dtype
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    inside: bool = True

    def layer(self, streamed: bool) -> CapsuleLayer:
        """Return the layer with its tensors."""
        layer = LAYERS[self.kind](routing=self.routing, streamed=streamed, **self.options).to(self.dtype).eval()
        state = {name: tensor for name, tensor in self.tensors.items() if name not in ("pose", "activation")}
        layer.load_state_dict(state, strict=False)
        return layer

    def children(self) -> Capsules:
        """Return the children, as leaves of a new graph."""
        activation = self.tensors.get("activation")
        leaf = None if activation is None else activation.clone().requires_grad_()
        return Capsules(self.tensors["pose"].clone().requires_grad_(), leaf)

    def save(self, path: Path) -> None:
        """Write it to a file, for `LayerInput.load`."""
        values = {"kind": self.kind, "options": self.options, "dtype": str(self.dtype), "inside": self.inside}
        torch.save({**values, "routing": to_plain(self.routing), "tensors": self.tensors}, path)

    @classmethod
    def load(cls, path: Path) -> "LayerInput":
        """Read a saved input."""
        values = torch.load(path, weights_only=True)
        dtype = getattr(torch, values["dtype"].removeprefix("torch."))
        routing = from_plain(Routing, values["routing"])
        return cls(routing, values["kind"], values["options"], dtype, values["tensors"], values["inside"])

    def __str__(self) -> str:
        return f"{self.routing} {self.kind} {self.options} {self.dtype} {'inside' if self.inside else 'outside'}"


class Layers(Target):
    """Layers with every routing."""

    name, unit = "layers", "evaluations"
    good = ("finite", "outside", "unsupported")

    def prepare(self, work: Path) -> None:
        """Create the directory of the last input."""
        torch.set_num_threads(1)
        (work / self.input).mkdir(exist_ok=True)

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Evaluate one layer on all paths."""
        rng = np.random.default_rng([seed, index])
        drawn = draw_input(rng)
        name = type(drawn.routing).name() if isinstance(drawn, LayerInput) else drawn
        if not isinstance(drawn, LayerInput):
            return Case(index, name, "unsupported", evaluations=0)
        drawn.save(work / self.input / "input.pt")  # before: the process may crash
        outcome, message = evaluate_paths(drawn)
        return Case(index, name, outcome, f"{message}: {drawn}", BATCH * len(PATHS))


def evaluate_paths(drawn: LayerInput) -> tuple[str, str]:
    """Evaluate a layer on all paths; return the outcome and a message."""
    for path in PATHS:
        try:
            with forced_path(path):
                problem = find_non_finite(drawn.layer(path != "stored"), drawn.children())
        except DomainError as error:
            if drawn.inside:
                return "rejected-inside", f"{path}: {error}"
            continue
        except BaseException as error:
            return "exception", "".join(traceback.format_exception(error)[-3:])
        if not drawn.inside:
            return "accepted-outside", path
        if problem:
            return "non-finite", f"{path}: {problem}"
    return ("finite" if drawn.inside else "outside"), ""


@contextlib.contextmanager
def forced_path(path: str) -> Iterator[None]:
    """Force the kernel (if it is available) or chunks of one slot for streamed votes."""
    with contextlib.ExitStack() as stack:
        if path == "chunks":
            stack.enter_context(mock.patch.object(dispatch, "has_kernel", return_value=False))
            stack.enter_context(mock.patch.object(dispatch, "CHUNK_BYTES", 1))
        yield


def find_non_finite(layer: CapsuleLayer, children: Capsules) -> str:
    """Return the name of the first result or gradient that is not finite; an empty string if there is none."""
    parents = layer(children)
    outputs = {name: tensor for name, tensor in parents._asdict().items() if tensor is not None}
    # Different directions for all values: with equal ones, gradients through a softmax cancel.
    directions = [torch.arange(t.numel()).view(t.shape).cos().to(t.dtype) for t in outputs.values()]
    torch.autograd.backward(list(outputs.values()), directions)
    results = {
        **outputs,
        **{f"gradient of {name}": t.grad for name, t in children._asdict().items() if t is not None},
        **{f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()},
    }
    for name, tensor in results.items():
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            bad = ~torch.isfinite(tensor.detach())
            images = sorted(set(bad.nonzero()[:, 0].tolist())) if bad.dim() and name in ("pose", "activation") else []
            return f"{name}, {int(bad.sum())} of {bad.numel()} values" + (f" of images {images}" if images else "")
    return ""


# Random layers and values ----------------------------------------------------------------------------------------


def draw_input(rng: np.random.Generator) -> LayerInput | str:
    """Return a random layer with adversarial values, or the name of the routing if it rejects the layer's geometry."""
    cls = ROUTINGS.get(str(rng.choice(ROUTINGS.list())))
    routing = _draw_routing(cls, rng)
    number = rng.random()
    kind: LayerKind = "dense" if number < 0.5 else "conv" if number < 0.9 else "transposed"
    matrix = rng.random() < 0.4
    dim = int(rng.choice([1, 4])) if matrix else int(rng.integers(1, 6))
    child_dim = dim if matrix or routing.residual else int(rng.integers(1, 6))
    parents = int(rng.integers(1, 5))
    types = parents if routing.residual else int(rng.integers(1, 6))
    pose: Literal["vector", "matrix"] = "matrix" if matrix else "vector"
    options: dict[str, Any] = {"pose": pose}
    if kind == "dense":
        options |= {"children": types, "child_dim": child_dim, "parents": parents, "parent_dim": dim}
        shape: tuple[int, ...] = (BATCH, types)
    else:
        types = types if routing.residual else min(types, 3)
        grid = tuple(int(size) for size in rng.integers(2, 5, 2))
        options |= {"child_types": types, "child_dim": child_dim, "parent_types": parents, "parent_dim": dim}
        options |= {"kernel_size": int(rng.integers(1, 3)), "stride": int(rng.integers(1, 3)), "grid": grid}
        options |= {"padding": int(rng.integers(0, 2)), "weights": str(rng.choice(["kernel", "position", "type"]))}
        if kind == "transposed" and routing.residual:
            options |= {"kernel_size": 1, "stride": 1, "padding": 0}  # the grid must stay the same
        elif kind == "transposed":
            options["padding"] = min(options["padding"], options["kernel_size"] - 1)
            options["output_padding"] = int(rng.integers(0, options["stride"]))
        elif routing.residual:
            options |= {"stride": 1, "padding": "same"}
        shape = (BATCH, *grid, types)
    drawn = LayerInput(routing, kind, options, DTYPES[int(rng.integers(len(DTYPES)))])
    try:
        layer = drawn.layer(False)
    except ValueError:
        return cls.name()
    _draw_tensors(drawn, layer, shape, child_dim, rng)
    return drawn


def _draw_routing(cls: type[Routing], rng: np.random.Generator) -> Routing:
    """Return a routing; each bool, choice and number of iterations differs from the default at random."""
    changes: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if rng.random() < 0.6:
            continue
        if hints[field.name] is bool:
            changes[field.name] = bool(rng.integers(2))
        elif typing.get_origin(hints[field.name]) is Literal:
            choices = typing.get_args(hints[field.name])
            changes[field.name] = choices[int(rng.integers(len(choices)))]
        elif field.name == "iterations":
            changes[field.name] = int(rng.integers(1, 6))
        elif field.name == "variance_floor":
            changes[field.name] = float(rng.choice([0.0, 1e-12, 1e-2]))
    try:
        return cls(**changes)
    except ValueError:  # a combination that the routing rejects
        return cls()


def _draw_tensors(
    drawn: LayerInput, layer: CapsuleLayer, shape: tuple[int, ...], child_dim: int, rng: np.random.Generator
) -> None:
    """Draw weights and children such that the votes are inside the domain or, in one of ten cases, outside of it."""
    limit = drawn.routing.max_vote(drawn.dtype)
    largest = math.log10(1e10 if limit is None else limit)
    # Exponents of poses, weights and activations add up to this, each counted as at least 0.
    room = largest - 0.01 - math.log10(layer.geometry.columns)
    activation_exponent = (None, 0.0, 0.0, min(room, 3.0))[int(rng.integers(4))]  # above 1: not a probability
    drawn.inside = limit is None or rng.random() > 0.1
    weight_exponent = rng.uniform(0, room - (activation_exponent or 0.0)) if rng.random() < 0.3 else 0.0
    pose_exponent = room - weight_exponent - (activation_exponent or 0.0)
    if not drawn.inside:
        pose_exponent += rng.uniform(0.1, 15)
    least = SMALLEST[drawn.dtype]
    pose = np.stack([draw_values((*shape[1:], child_dim), pose_exponent, least, rng) for _ in range(BATCH)])
    if not drawn.inside:
        pose.reshape(-1)[int(rng.integers(pose.size))] = 10.0**pose_exponent
    weight = draw_values(tuple(layer.weight.shape), weight_exponent, least, rng)
    if not drawn.inside:
        weight.reshape(-1)[int(rng.integers(weight.size))] = 10.0**weight_exponent
    axis = -2 if rng.random() < 0.3 else None  # equal parents: their logits are tied
    if axis is not None and drawn.inside:
        weight = np.broadcast_to(weight[..., :1, :], weight.shape)
    tensors = {"pose": pose, "weight": weight}
    if activation_exponent is not None:
        images = [np.abs(draw_values(shape[1:], activation_exponent, least, rng)) for _ in range(BATCH)]
        tensors["activation"] = np.stack(images)
        if not drawn.inside:
            tensors["activation"].reshape(-1)[int(rng.integers(images[0].size))] = 10.0**activation_exponent
    drawn.tensors = {name: torch.tensor(values).to(drawn.dtype) for name, values in tensors.items()}
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    for name, tensor in layer.state_dict().items():
        if name != "weight" and tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            drawn.tensors[name] = (tensor.double() + float(rng.choice([0.0, 0.3, 3.0])) * noise).to(drawn.dtype)


def draw_values(shape: tuple[int, ...], exponent: float, least: float, rng: np.random.Generator) -> np.ndarray:
    """Return values of magnitude up to ``10**exponent`` in a random pattern.

    Args:
        shape: shape of the values.
        exponent: exponent of the largest magnitude.
        least: exponent of the smallest subnormal number.
        rng: random numbers.
    """
    kind, top = str(rng.choice(PATTERNS)), 10.0**exponent
    signs = rng.choice([-1.0, 1.0], shape)
    if kind == "zero":
        return np.zeros(shape)
    if kind == "subnormal":
        return signs * 10.0 ** rng.uniform(least, least + 7, shape)
    if kind == "tiny":
        return signs * 10.0 ** (rng.uniform(least + 7, 0) + rng.uniform(-1, 0, shape))
    if kind == "constant":
        return np.full(shape, float(rng.choice([-1, 1])) * 10.0 ** rng.uniform(least, exponent))
    if kind == "normal":
        return np.clip(rng.normal(0, 10.0 ** rng.uniform(-3, exponent), shape), -top, top)
    if kind == "single":
        values = np.zeros(shape)
        values.reshape(-1)[int(rng.integers(values.size))] = 10.0 ** rng.uniform(least, exponent)
        return values
    if kind == "cancelling":
        values = np.full(shape, 10.0 ** rng.uniform(0, exponent)) if exponent > 0 else np.full(shape, top)
        values.reshape(-1)[::2] *= -1
        return values
    if kind == "mixed":
        return signs * 10.0 ** rng.uniform(least, exponent, shape)
    if kind == "rows":  # the same pose for all children, or the same children with different scales
        row = rng.normal(0, 1, shape[-1:]) / 4
        scales = 10.0 ** rng.uniform(least, exponent, shape[:-1])[..., None] if rng.random() < 0.5 else top
        return np.clip(row * scales * np.ones(shape), -top, top)
    return signs * top * rng.choice([1.0, 1.0, 0.5, 1e-3], shape)
