"""The table of a model's layers: shapes, parameters, multiply-adds."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_capsules
from torchcaps.nn import CapsuleActivation, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer, ConvCapsules
from torchcaps.profiling.twin import sharing_twin
from torchcaps.votes import Votes

if TYPE_CHECKING:
    from torchcaps.models.network import Network

__all__ = ["Row", "Summary", "shortened", "summarize"]


@dataclass(frozen=True)
class Row:
    """One layer: what comes out of it for one image, and what it costs.

    Args:
        name: in the model.
        kind: what it does, in words.
        output: its shape, without the batch.
        parameters: frozen ones included.
        multiply_adds: of one image's forward pass.
        votes: numbers in the vote tensor of one image; 0 for other layers.
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    multiply_adds: int
    votes: int = 0


@dataclass(frozen=True)
class Summary:
    """The layers of a model in order. As a string it is a table."""

    title: str
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(row.parameters for row in self.rows)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one image's forward pass."""
        return sum(row.multiply_adds for row in self.rows)

    @property
    def votes(self) -> int:
        """Numbers in all vote tensors of one image, were they stored."""
        return sum(row.votes for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as text, a head and a last row with the totals included."""
        table: list[tuple[str, ...]] = [("layer", "kind", "out", "parameters", "multiply-adds", "votes")]
        for row in self.rows:
            shape = " x ".join(map(str, row.output))
            table.append((row.name, row.kind, shape, *map(_count, (row.parameters, row.multiply_adds, row.votes))))
        table.append(("total", "", "", *map(_count, (self.parameters, self.multiply_adds, self.votes))))
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


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


class _CountedVotes(Votes):
    """Votes that count the multiply-adds of what is asked of them."""

    def __init__(self, votes: Votes, add: Callable[[int], None]) -> None:
        super().__init__(votes.wiring, votes.shape)
        self._votes, self._add = votes, add

    def _passes(self, count: int) -> None:
        self._add(count * math.prod(self.shape[1:]))

    def sum(self, coupling: Tensor) -> Tensor:
        self._passes(1)
        return self._votes.sum(coupling)

    def dot(self, query: Tensor) -> Tensor:
        self._passes(1)
        return self._votes.dot(query)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        self._passes(2)
        return self._votes.sqsum(coupling, mean)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        self._passes(2)
        return self._votes.sqdist(mean, scale)

    def mix(self, kernel: Tensor) -> Tensor:
        self._passes(self.shape[-3])
        return self._votes.mix(kernel)

    def dense(self) -> Tensor:
        return self._votes.dense()

    def detach(self) -> Self:
        return type(self)(self._votes.detach(), self._add)


@dataclass
class _Record:
    """What is seen of a layer while the twin runs."""

    output: tuple[int, ...] = ()
    multiply_adds: int = 0
    votes: int = 0
    entered: Tensor | None = None  # the children that came in last
    counted: Tensor | None = None  # those whose votes were counted last


def summarize(model: "Network") -> Summary:
    """Run a model's twin on one black image and write down what each layer does.

    The votes of a layer count once for each set of children, and a multiply-add for each number of each reduction that
    the routing asks of them; a streamed layer makes them again for every reduction, which is not counted.
    """
    twin = sharing_twin(model).eval()
    records: dict[str, _Record] = {}
    parts = dict(_parts(twin))
    with torch.no_grad():
        for name, part in parts.items():
            records[name] = record = _Record()
            if isinstance(part, CapsuleLayer):
                _count_votes(part, record)
            else:
                _count_products(part, record)
        twin(torch.zeros(1, *model.spec.image, device=next(twin.parameters()).device))
    rows = []
    before = model.spec.image
    for name, part in parts.items():
        record, parameters = records[name], sum(parameter.numel() for parameter in part.parameters())
        if parameters or record.multiply_adds or (record.output != before and not isinstance(part, nn.Flatten)):
            rows.append(Row(name, _kind(part), record.output, parameters, record.multiply_adds, record.votes))
        before = record.output
    spec = shortened(model.spec, always=("image", "classes", "routing"))
    return Summary(f"{model.name}: {spec}", tuple(rows))


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name the parts that get a row: those of the front, the capsule layers, the head, the decoder."""
    for name, module in model.named_children():
        if name == "front":
            yield from module.named_children()
        elif name == "capsules":
            yield from module.get_submodule("layers").named_children()
        else:
            yield name, module


def _count_votes(layer: CapsuleLayer, record: _Record) -> None:
    """Have a layer of the twin count its votes, and what routing asks of them."""
    enter, make = layer.check_children, layer.make_votes

    def note(capsules: Capsules | Tensor) -> Capsules:
        record.entered = as_capsules(capsules).pose  # before it is flattened, which makes another tensor of it
        return enter(capsules)

    def add(count: int) -> None:
        record.multiply_adds += count

    def make_counted(children: Capsules, couplings: bool = False) -> Votes:
        votes = make(children, couplings)
        *sites, _, parents, dim = votes.shape[1:]
        record.output = (*sites, parents, dim)
        record.votes = math.prod(votes.shape[1:])
        if record.counted is not record.entered:
            record.counted = record.entered
            add(record.votes * layer.geometry.columns)
        return _CountedVotes(votes, add)

    layer.check_children, layer.make_votes = note, make_counted  # the twin is ours alone


def _count_products(part: nn.Module, record: _Record) -> None:
    """Have a part of the twin count the multiply-adds of what it is made of, and note its output."""

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        record.output = tuple((output.pose if isinstance(output, Capsules) else output).shape[1:])

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        record.multiply_adds += output[0].numel() * _products(module)

    part.register_forward_hook(note)
    for module in part.modules():
        if _products(module):
            module.register_forward_hook(count)


def _products(module: nn.Module) -> int:
    """Return the multiply-adds for each number that comes out of a module; 0 where they are not worth counting.

    torch's own counter (``torch.utils.flop_counter``) would do, and the tests hold this against it, but it loads the
    compiler: printing a model would take seconds.
    """
    if isinstance(module, nn.Conv2d):
        return module.weight[0].numel()
    if isinstance(module, nn.Linear):
        return module.in_features
    return module.matrix.shape[-1] if isinstance(module, CapsuleActivation) else 0


def _kind(part: nn.Module) -> str:
    """Say in words what a part does."""
    if isinstance(part, nn.Conv2d):
        return f"conv {_window(part.kernel_size, part.stride)}"
    if isinstance(part, PrimaryCapsules):
        return f"primary {_window(part.kernel_size, part.stride)}, {part.types} types of {part.dim}"
    if isinstance(part, CapsuleLayer):
        return f"{_layer_kind(part)}, {shortened(part.routing)}"
    if isinstance(part, nn.Linear):
        return "linear"
    return type(part).__name__


def _layer_kind(layer: CapsuleLayer) -> str:
    if isinstance(layer, ConvCapsules):
        return f"conv capsules {_window(layer.kernel_size, layer.stride)}"
    return "dense capsules"


def _window(kernel: Any, stride: Any) -> str:
    window = f"{kernel[0]}x{kernel[1]}"
    return window if tuple(stride) == (1, 1) else f"{window} stride {stride[0]}"


def shortened(choice: Any, always: tuple[str, ...] = ("iterations",)) -> str:
    """Return a dataclass as text with only those fields that differ from its defaults, and those always shown.

    >>> from torchcaps.routing import Dynamic
    >>> shortened(Dynamic(3, leak=True))
    'Dynamic(iterations=3, leak=True)'
    """
    shown = []
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        if field.name in always or value != field.default:
            shown.append(f"{field.name}={shortened(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(choice).__name__}({', '.join(shown)})"
