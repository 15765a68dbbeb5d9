"""What a paper is made of, as its file writes it down: runs, measurements, tables and figures with what was published.

Everything here is a choice, frozen and without tensors. A run that two tables name is one run: it is told by what it
is, not by where it stands.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Cell", "Claim", "Item", "Measure", "Paper", "Parameters", "Published", "Row", "Run", "Source"]


@dataclass(frozen=True)
class Published:
    """A number as a paper prints it.

    Args:
        value: the number.
        spread: what follows its ±.
        note: why it can't be right, or is not what it seems; printed beside it.
    """

    value: float
    spread: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Run:
    """A training.

    Args:
        model: the name of a model.
        changes: what is not as the model's recipe has it, at every scale: fields of the model, its recipe or the run.
        cpu: what else is changed at the scale ``cpu``.
    """

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cpu: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def but(self, cpu: Mapping[str, Any] | None = None, **changes: Any) -> "Run":
        """Return the run with other changes, and others at the scale ``cpu``."""
        return dataclasses.replace(self, changes={**self.changes, **changes}, cpu={**self.cpu, **(cpu or {})})


@dataclass(frozen=True)
class Parameters:
    """The number of parameters of a run's model, in the paper's own size: counted, never trained."""

    run: Run


@dataclass(frozen=True)
class Measure:
    """A measurement on trained networks, or on none.

    Args:
        name: of its record.
        function: ``function(context, **runs) -> {name: number, list or tensor}``; `torchcaps.reproduce.context.Context`
            says what it is given.
        runs: the networks that it needs, by the names of its arguments.
        members: how many networks of each run, with seeds one after the other: an ensemble (two at the scale
            ``smoke``).
        options: of the function, at the scale ``full``; ``cpu`` and ``smoke`` change them.
        after: measurements whose records it needs.
        leaves: the file in its working folder that measurements after it need.
        once: whether the seed makes no difference, so that it is done for the first alone.
        data: data sets that it reads beside those of its runs.
        version: counts how often what is measured has changed: records of another one are not taken.
        seconds: what it is likely to take at the scale ``cpu``, for the plan.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    runs: Mapping[str, Run] = field(default_factory=dict, hash=False)
    members: int = 1
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cpu: Mapping[str, Any] = field(default_factory=dict, hash=False)
    smoke: Mapping[str, Any] = field(default_factory=dict, hash=False)
    after: Mapping[str, "Measure"] = field(default_factory=dict, hash=False)
    leaves: str = ""
    once: bool = False
    data: tuple[str, ...] = ()
    version: int = 1
    seconds: float = 20.0


Source = Run | Measure | Parameters


@dataclass(frozen=True)
class Cell:
    """A number of a table.

    Args:
        published: what the paper prints; ``None`` where it prints nothing, or nothing that can be read.
        source: where ours comes from; ``None``: it is not ours to measure.
        read: which number of a record: ``"error"`` or ``"accuracy"`` of the test images in per cent, ``"parameters"``,
            or the name of one of a measurement's.
    """

    published: Published | float | None = None
    source: Source | None = None
    read: str = "error"

    @property
    def printed(self) -> Published | None:
        """What the paper prints."""
        if isinstance(self.published, int | float):
            return Published(float(self.published))
        return self.published


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        label: what stands before it.
        cells: a cell for each column that it has.
        alike: rows with the same word here vary alike from seed to seed, and share what is known of that variance. Runs
            of one column do where they have none; measurements without a word share it with no other.
    """

    label: str
    cells: Mapping[str, Cell] = field(hash=False)
    alike: str = ""


@dataclass(frozen=True)
class Claim:
    """What a paper says of two of its numbers, to be held against ours.

    Args:
        text: the claim.
        better, worse: (row, column) of the two.
        lower: whether less is better, as of errors.
    """

    text: str
    better: tuple[str, str]
    worse: tuple[str, str]
    lower: bool = True


@dataclass(frozen=True)
class Item:
    """A table or a figure.

    Args:
        name: on the command line: ``table1``, ``fig4``.
        title: as the paper calls it.
        about: what it shows, in a sentence.
        columns: of the table; each a (name, unit).
        rows: the literal.
        claims: what the paper reads off it.
        draw: ``draw(results, out)`` draws its figure from records; by default ours beside the paper's, as points.
        measures: measurements that only the figure needs.
        notes: what must be known to read it: what can't be right, what the paper leaves open, what we chose.
    """

    name: str
    title: str
    about: str
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    draw: Callable[[Any, Path], None] | None = None
    measures: tuple[Measure, ...] = ()
    notes: tuple[str, ...] = ()

    def sources(self, rows: tuple[str, ...] = (), columns: tuple[str, ...] = ()) -> list[Source]:
        """Return what has to be there for it, each once: that of some rows and columns, or all and the figure's."""
        chosen = [row for row in self.rows if not rows or row.label in rows]
        cells = [cell for row in chosen for name, cell in row.cells.items() if not columns or name in columns]
        found: list[Source] = [cell.source for cell in cells if cell.source is not None]
        found += () if rows or columns else self.measures
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        name: on the command line.
        citation: authors, title, where.
        claimed: what it says it has shown.
        cost: what its own setting takes.
        deviations: where we differ, and why.
        items: its tables and figures.
        scale: what the scale ``cpu`` changes, in words.
    """

    name: str
    citation: str
    claimed: str
    cost: str
    scale: str
    deviations: tuple[str, ...]
    items: tuple[Item, ...]

    def item(self, name: str) -> Item:
        """Return a table or figure; list what there is where there is no such one."""
        known = {item.name: item for item in self.items}
        key = name.lower().replace(" ", "").replace(".", "").replace("figure", "fig").replace("section", "sec")
        if key not in known:
            raise ValueError(f"{self.name} has no {name!r}: there are {', '.join(known)}")
        return known[key]
