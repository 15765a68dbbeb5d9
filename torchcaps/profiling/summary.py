"""Layer table of a model: shapes, parameters, multiply-adds and votes per image."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleActivation, HomogeneousCapsules, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer, ConvCapsules
from torchcaps.votes import Votes
from torchcaps.votes.dispatch import VotePath, choose_path

if TYPE_CHECKING:
    from torchcaps.models.network import Network

__all__ = ["LayerRow", "ModelSummary", "layer_paths", "short_repr", "summarize"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class LayerRow:
    """One layer of the table; counts are per image.

    Args:
        name: name of the layer in the model.
        kind: description of the layer.
        output: output shape, without the batch.
        parameters: number of parameters, including frozen ones.
        multiply_adds: multiply-adds of a forward pass.
        votes: number of elements of the vote tensor; 0 for other layers.

    >>> import torchcaps
    >>> from torchcaps.profiling import summarize
    >>> row = summarize(torchcaps.create_model("capsnet_small")).rows[0]
    >>> isinstance(row, LayerRow), row.output
    (True, (64, 20, 20))
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    multiply_adds: int
    votes: int = 0


@dataclass(frozen=True)
class ModelSummary:
    """Layers of a model in order. ``str(summary)`` is a table.

    >>> import torchcaps
    >>> from torchcaps.profiling import summarize
    >>> summary = summarize(torchcaps.create_model("capsnet_small"))
    >>> summary.parameters == sum(row.parameters for row in summary.rows)
    True
    """

    title: str
    rows: tuple[LayerRow, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(row.parameters for row in self.rows)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a forward pass of one image."""
        return sum(row.multiply_adds for row in self.rows)

    @property
    def votes(self) -> int:
        """Number of elements of all vote tensors of one image if they were stored."""
        return sum(row.votes for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as text, with a header row and a row of totals."""
        table: list[tuple[str, ...]] = [("layer", "kind", "out", "parameters", "multiply-adds", "votes")]
        for row in self.rows:
            shape = " x ".join(map(str, row.output))
            counts = map(_format_count, (row.parameters, row.multiply_adds, row.votes))
            table.append((row.name, row.kind, shape, *counts))
        table.append(("total", "", "", *map(_format_count, (self.parameters, self.multiply_adds, self.votes))))
        return table

    def __str__(self) -> str:
        table = self.cells()
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = []
        for line in table:
            left = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
            lines.append("  ".join(left + right).rstrip())
        return "\n".join([self.title, *lines])


def _format_count(number: int) -> str:
    return f"{number:,}" if number else "-"


class _CountedVotes(Votes):
    """Votes that count the multiply-adds of their reductions."""

    def __init__(self, votes: Votes, add: Callable[[int], None]) -> None:
        super().__init__(votes.wiring, votes.shape)
        self._votes, self._add = votes, add

    def _count(self, per_element: int) -> None:
        self._add(per_element * math.prod(self.shape[1:]))

    def sum(self, coupling: Tensor) -> Tensor:
        self._count(1)
        return self._votes.sum(coupling)

    def dot(self, query: Tensor) -> Tensor:
        self._count(1)
        return self._votes.dot(query)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        self._count(2)
        return self._votes.sqsum(coupling, mean)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        self._count(2)
        return self._votes.sqdist(mean, scale)

    def mix(self, kernel: Tensor) -> Tensor:
        self._count(self.shape[-3])
        return self._votes.mix(kernel)

    def dense(self) -> Tensor:
        return self._votes.dense()

    def detach(self) -> Self:
        return type(self)(self._votes.detach(), self._add)


@dataclass
class _Counts:
    """Counts of one layer during the forward pass."""

    output: tuple[int, ...] = ()
    multiply_adds: int = 0
    votes: int = 0
    children: Tensor | None = None  # those whose votes were counted last


def summarize(model: "Network") -> ModelSummary:
    """Return the layer table of a model, from a forward pass of one black image through a copy that shares its weights.

    The votes of a layer are counted once per set of children, plus one multiply-add per element for each reduction of
    the routing. Streamed layers recompute their votes for every reduction, which is not counted.

    >>> import torchcaps
    >>> summarize(torchcaps.create_model("capsnet_small")).parameters > 0
    True
    """
    twin = _copy_sharing_weights(model).eval()
    parts = dict(_named_parts(twin))
    counts = {name: _Counts() for name in parts}
    with torch.no_grad():
        for name, part in parts.items():
            if isinstance(part, CapsuleLayer):
                _count_votes(part, counts[name])
            else:
                _count_products(part, counts[name])
        twin(torch.zeros(1, *model.spec.image, device=next(twin.parameters()).device))
    rows = []
    before = model.spec.image
    for name, part in parts.items():
        count, parameters = counts[name], sum(parameter.numel() for parameter in part.parameters())
        if parameters or count.multiply_adds or (count.output != before and not isinstance(part, nn.Flatten)):
            rows.append(LayerRow(name, _describe(part), count.output, parameters, count.multiply_adds, count.votes))
        before = count.output
    spec = short_repr(model.spec, always=("image", "classes", "routing"))
    return ModelSummary(f"{model.name}: {spec}", tuple(rows))


def layer_paths(model: nn.Module, summary: ModelSummary, batch_size: int) -> dict[str, VotePath]:
    """Return the computation path of each capsule layer at this batch size, by the layer's name in the table."""
    rows = {row.name: row for row in summary.rows}
    element_size = next(model.parameters()).element_size()
    paths = {}
    for full_name, layer in model.named_modules():
        if isinstance(layer, CapsuleLayer):
            row = rows[full_name.split(".")[-1]]
            lanes = batch_size * math.prod(row.output[:-2])
            paths[row.name] = choose_path(layer.streamed, layer.weight, batch_size * row.votes * element_size, lanes)
    return paths


def _copy_sharing_weights(model: Module) -> Module:
    """Return a copy of a model with the same parameter tensors and without the user's hooks."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin


def _named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that get a row: those of the front, the capsule layers, the head, the decoder."""
    for name, module in model.named_children():
        if name == "front":
            yield from module.named_children()
        elif name == "capsules":
            yield from module.get_submodule("layers").named_children()
        else:
            yield name, module


def _count_votes(layer: CapsuleLayer, counts: _Counts) -> None:
    """Make a layer of the copy count its votes and their reductions."""

    def add(count: int) -> None:
        counts.multiply_adds += count

    def counted_votes(layer: CapsuleLayer, children: Capsules, couplings: bool) -> Votes:
        """Return votes that count their reductions; record their number, and the multiply-adds of computing them."""
        votes = layer.default_votes(children, couplings)
        *sites, _, parents, dim = votes.shape[1:]
        counts.output = (*sites, parents, dim)
        counts.votes = math.prod(votes.shape[1:])
        # By storage: flattening the children on entry makes a new tensor of the same memory.
        if counts.children is None or not _shares_storage(counts.children, children.pose):
            counts.children = children.pose
            add(counts.votes * layer.geometry.columns)
        return _CountedVotes(votes, add)

    layer.votes_factory = counted_votes


def _shares_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _count_products(part: nn.Module, counts: _Counts) -> None:
    """Register hooks that count the multiply-adds of a part of the copy, and record its output shape."""

    def record_output(module: nn.Module, inputs: Any, output: Any) -> None:
        counts.output = tuple((output.pose if isinstance(output, Capsules) else output).shape[1:])

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counts.multiply_adds += output[0].numel() * _products_per_output(module)

    part.register_forward_hook(record_output)
    for module in part.modules():
        if _products_per_output(module):
            module.register_forward_hook(count)


def _products_per_output(module: nn.Module) -> int:
    """Return the multiply-adds per output element of a module; 0 for modules that are not counted.

    Tests compare this with ``torch.utils.flop_counter``, which is not used here because it loads the compiler: printing
    a model would take seconds.
    """
    if isinstance(module, nn.Conv2d):
        return module.weight[0].numel()
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, HomogeneousCapsules):
        return module.weight.shape[1]
    return module.matrix.shape[-1] if isinstance(module, CapsuleActivation) else 0


def _describe(part: nn.Module) -> str:
    """Return the column "kind" of a part."""
    if isinstance(part, nn.Conv2d):
        return f"conv {_format_window(part.kernel_size, part.stride)}"
    if isinstance(part, PrimaryCapsules):
        window = _format_window(part.kernel_size, part.stride) + (" depthwise" if part.pose.groups > 1 else "")
        return f"primary {window}, {part.types} types of {part.dim}"
    if isinstance(part, ConvCapsules):
        return f"conv capsules {_format_window(part.kernel_size, part.stride)}, {short_repr(part.routing)}"
    if isinstance(part, CapsuleLayer):
        return f"dense capsules, {short_repr(part.routing)}"
    if isinstance(part, nn.Linear):
        return "linear"
    return type(part).__name__


def _format_window(kernel: Any, stride: Any) -> str:
    window = f"{kernel[0]}x{kernel[1]}"
    return window if tuple(stride) == (1, 1) else f"{window} stride {stride[0]}"


def short_repr(config: Any, always: tuple[str, ...] = ("iterations",)) -> str:
    """Return the repr of a dataclass with only the fields that differ from their defaults, and those in ``always``.

    >>> from torchcaps.routing import Dynamic
    >>> short_repr(Dynamic(3, leak=True))
    'Dynamic(iterations=3, leak=True)'
    """
    shown = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in always or value != field.default:
            shown.append(f"{field.name}={short_repr(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(config).__name__}({', '.join(shown)})"
