"""Declaration of a paper's experiments: runs, measurements, tables, figures and the published numbers.

All classes are frozen dataclasses without tensors. Two tables that declare equal runs share one run, since a run is
identified by its settings.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Cell", "Claim", "Item", "Measurement", "Paper", "ParameterCount", "Published", "Run", "Source", "TableRow"]


@dataclass(frozen=True)
class Published:
    """A number as printed in the paper.

    Args:
        value: the number.
        spread: the number after its ±, if any.
        note: footnote printed below the table: why the number is implausible or needs an explanation.
    """

    value: float
    spread: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        model: name of the model.
        changes: overrides at every scale; keys are fields of the model, of its recipe or of the run.
        cpu: further overrides at the scale ``cpu``.
        long: further overrides at the scale ``long``, on top of those of ``cpu``.
        half_length: half the length with a complete schedule of its own, see `halved`.
    """

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cpu: Mapping[str, Any] = field(default_factory=dict, hash=False)
    long: Mapping[str, Any] = field(default_factory=dict, hash=False)
    half_length: bool = False

    def halved(self) -> "Run":
        """Return the half-length companion, see `torchcaps.reproduce.half_length`."""
        return dataclasses.replace(self, half_length=True)

    def replace(
        self, cpu: Mapping[str, Any] | None = None, long: Mapping[str, Any] | None = None, **changes: Any
    ) -> "Run":
        """Return a copy with additional overrides."""
        return dataclasses.replace(
            self,
            changes={**self.changes, **changes},
            cpu={**self.cpu, **(cpu or {})},
            long={**self.long, **(long or {})},
        )


@dataclass(frozen=True)
class ParameterCount:
    """The number of parameters of a run's model at the paper's size; nothing is trained."""

    run: Run


@dataclass(frozen=True)
class Measurement:
    """A measurement, usually on trained networks.

    Args:
        name: name of its record.
        function: ``function(context, **runs, **options) -> {name: number, list or tensor}``, where ``context`` is a
            `torchcaps.reproduce.runner.MeasurementContext`.
        runs: the trained networks that it needs, by argument name.
        ensemble_size: number of networks per run, with consecutive seeds (two at the scale ``smoke``).
        from_records: pass the records of the runs to the function instead of the trained networks, so that their
            weights are not needed.
        options: keyword arguments of the function at the scale ``full``.
        cpu, long, smoke: overrides of ``options`` at these scales; those of ``long`` are applied on top of ``cpu``.
        depends_on: measurements whose results it reads, by name.
        output_file: file in its working directory that dependent measurements read.
        seed_independent: the result does not depend on the seed, so it is measured once.
        datasets: data sets that it reads in addition to those of its runs.
        version: incremented if the definition of the measurement changes; records of other versions are ignored.
        estimated_seconds: duration at the scale ``cpu``, for the plan.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    runs: Mapping[str, Run] = field(default_factory=dict, hash=False)
    ensemble_size: int = 1
    from_records: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cpu: Mapping[str, Any] = field(default_factory=dict, hash=False)
    long: Mapping[str, Any] = field(default_factory=dict, hash=False)
    smoke: Mapping[str, Any] = field(default_factory=dict, hash=False)
    depends_on: Mapping[str, "Measurement"] = field(default_factory=dict, hash=False)
    output_file: str = ""
    seed_independent: bool = False
    datasets: tuple[str, ...] = ()
    version: int = 1
    estimated_seconds: float = 20.0

    @property
    def half_length(self) -> bool:
        """Whether its networks are half-length companions."""
        return any(run.half_length for run in self.runs.values()) or any(
            dependency.half_length for dependency in self.depends_on.values()
        )

    def halved(self) -> "Measurement":
        """Return the same measurement on half-length networks; unchanged if it and its dependencies have none.

        A measurement that trains something itself, such as a GAN, keeps its options.
        """
        runs = {name: run.halved() for name, run in self.runs.items()}
        depends_on = {name: dependency.halved() for name, dependency in self.depends_on.items()}
        halved = dataclasses.replace(self, runs=runs, depends_on=depends_on)
        return self if halved == self else dataclasses.replace(halved, name=f"{self.name}-half")


Source = Run | Measurement | ParameterCount


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Args:
        published: the printed number; ``None`` if the paper prints none or it is not legible.
        source: source of our number; ``None`` if we do not measure it.
        metric: ``"error"`` or ``"accuracy"`` on the test set in per cent, ``"recall 3"`` (of the class with index 3) or
            ``"lowest recall"`` in per cent, ``"seconds"``, ``"steps"`` or ``"epochs"`` of a run, or a key of a
            measurement's results.
    """

    published: Published | float | None = None
    source: Source | None = None
    metric: str = "error"

    @property
    def printed(self) -> Published | None:
        """The published number as a `Published`."""
        if isinstance(self.published, int | float):
            return Published(float(self.published))
        return self.published


@dataclass(frozen=True)
class TableRow:
    """A table row.

    Args:
        label: first column.
        cells: cells by column name.
        variance_group: rows of the same group share one pooled estimate of the variance between seeds. Runs in one
            column with the default ``""`` are pooled; measurements with the default are not.
    """

    label: str
    cells: Mapping[str, Cell] = field(hash=False)
    variance_group: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim that compares two numbers of a table.

    `torchcaps.reproduce.verdicts` judges it. By default this needs half-length companions of all runs behind the two
    numbers, which are planned with them.

    Args:
        text: the claim, as its author makes it.
        better, worse: (row label, column name) of the two numbers.
        lower_is_better: ``True`` for errors, ``False`` for accuracies.
        margin: for claims that something is as good: the largest disadvantage that still counts as equal, in the unit
            of the column. The better number may be worse by less than this.
        convergence: ``"training"`` if the numbers depend on how long networks were trained, so that half-length runs
            have to agree; ``"not applicable"`` otherwise, as for costs and parameter counts.
        convergence_reason: why training length does not matter; required for ``"not applicable"``.
        origin: ``"paper"``, or ``"ours"`` for a statement that the paper does not make; it is judged by the same rules,
            marked, and counted separately.
        case: which of several comparisons of the same claim this is, such as a direction or a size of a perturbation.
    """

    text: str
    better: tuple[str, str]
    worse: tuple[str, str]
    lower_is_better: bool = True
    margin: float = 0.0
    convergence: Literal["training", "not applicable"] = "training"
    convergence_reason: str = ""
    origin: Literal["paper", "ours"] = "paper"
    case: str = ""

    @property
    def statement(self) -> str:
        """The claim with its case in brackets."""
        return f"{self.text} ({self.case})" if self.case else self.text

    def __post_init__(self) -> None:
        if self.convergence not in ("training", "not applicable"):
            raise ValueError(
                f"Claim: convergence must be 'training' or 'not applicable', got {self.convergence!r}: {self.text}"
            )
        if (self.convergence == "training") == bool(self.convergence_reason):
            raise ValueError(
                "Claim: convergence_reason must be given for convergence='not applicable' and for no other, got "
                f"{self.convergence!r} with {self.convergence_reason!r}: {self.text}"
            )
        if self.origin not in ("paper", "ours"):
            raise ValueError(f"Claim: origin must be 'paper' or 'ours', got {self.origin!r}: {self.text}")
        if self.margin < 0:
            raise ValueError(f"Claim: margin must be 0 or more, got {self.margin}: {self.text}")


@dataclass(frozen=True)
class Item:
    """A table or figure.

    Args:
        name: name on the command line: ``table1``, ``fig4``.
        title: title in the paper.
        description: one sentence about its content.
        columns: unit by column name.
        rows: the table.
        claims: claims of the paper that the table supports.
        draw: ``draw(results, out)`` draws the figure from a `torchcaps.reproduce.statistics.Results`; by default our
            numbers are plotted next to the published ones.
        measurements: measurements that only the figure needs.
        notes: caveats, our choices if the paper is silent, and errors in the paper.
    """

    name: str
    title: str
    description: str
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    rows: tuple[TableRow, ...] = ()
    claims: tuple[Claim, ...] = ()
    draw: Callable[[Any, Path], None] | None = None
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    def sources(self, rows: tuple[str, ...] = (), columns: tuple[str, ...] = ()) -> list[Source]:
        """Return the distinct sources of some rows and columns; by default of all, and of the figure."""
        chosen = [row for row in self.rows if not rows or row.label in rows]
        cells = [cell for row in chosen for name, cell in row.cells.items() if not columns or name in columns]
        sources: list[Source] = [cell.source for cell in cells if cell.source is not None]
        sources += () if rows or columns else self.measurements
        return list(dict.fromkeys(sources))

    def cell(self, row: str, column: str) -> Cell:
        """Return the cell of a row label and a column name."""
        (match,) = (r for r in self.rows if r.label == row)
        return match.cells[column]

    def half_length_sources(self, rows: tuple[str, ...] = (), columns: tuple[str, ...] = ()) -> list[Source]:
        """Return the half-length companions of those `sources` that a claim compares and training length affects."""
        claims = [claim for claim in self.claims if claim.convergence == "training"]
        compared = {self.cell(*location).source for claim in claims for location in (claim.better, claim.worse)}
        selected = [s for s in self.sources(rows, columns) if s in compared and isinstance(s, Run | Measurement)]
        return list(dict.fromkeys(source.halved() for source in selected if source.halved() != source))

    def select_rows(self, selectors: list[str]) -> tuple[str, ...]:
        """Return the labels of the rows that match any selector: an index from 1, a label or a part of one.

        Raises:
            ValueError: a selector matches no row.
        """
        return self._select(selectors, [row.label for row in self.rows], "row")

    def select_columns(self, selectors: list[str]) -> tuple[str, ...]:
        """Return the names of the columns that match any selector; see `select_rows`."""
        return self._select(selectors, list(self.columns), "column")

    def _select(self, selectors: list[str], names: list[str], kind: str) -> tuple[str, ...]:
        """Return the names that match the selectors (indices from 1, or parts of names), in the order of the item."""
        selected: set[str] = set()
        for selector in selectors:
            if selector.isdigit() and 1 <= int(selector) <= len(names):
                matches = {names[int(selector) - 1]}
            else:
                exact = {name for name in names if name.lower() == selector.lower()}
                matches = exact or {name for name in names if selector.lower() in name.lower()}
            if not matches:
                listing = "; ".join(f"{index} {name!r}" for index, name in enumerate(names, start=1))
                expected = f"expected one of {listing}" if listing else f"it has no {kind}s"
                raise ValueError(f"{self.title} has no {kind} {selector!r}: {expected}")
            selected |= matches
        return tuple(name for name in names if name in selected)


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        name: name on the command line.
        citation: authors, title, venue.
        summary: the paper's main claims.
        cost: cost of the paper's own setting.
        cpu_scale: what the scale ``cpu`` changes.
        deviations: where we differ from the paper, and why.
        items: tables and figures.
    """

    name: str
    citation: str
    summary: str
    cost: str
    cpu_scale: str
    deviations: tuple[str, ...]
    items: tuple[Item, ...]

    def item(self, name: str) -> Item:
        """Return a table or figure by name; ``"Table 1"``, ``"figure 4"`` and ``"table1"`` are accepted."""
        items = {item.name: item for item in self.items}
        key = name.lower().replace(" ", "").replace(".", "").replace("figure", "fig").replace("section", "sec")
        if key not in items:
            close = difflib.get_close_matches(key, items, n=2)
            hint = f"did you mean {' or '.join(close)}? It has " if close else "expected one of "
            raise ValueError(f"{self.name} has no item {name!r}: {hint}{', '.join(items)}")
        return items[key]
