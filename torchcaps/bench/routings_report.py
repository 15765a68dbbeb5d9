"""Table, figure and documentation page of the comparison of routings, from its records."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.stats import student_quantile
from torchcaps.bench.routings import (
    CNN,
    DIM,
    PRIMARY_DIM,
    TYPES,
    Comparison,
    RoutingCell,
    baseline_channels,
    iter_selected,
    list_rows,
    pending_cells,
    read_record,
    selected_lr,
)

__all__ = ["HEADINGS", "RoutingRow", "draw_routings", "read_rows", "render_page"]

NOT_RUN, DIVERGED = "not run", "diverged"
UNIFORM = "uniform"
HEADINGS = ("routing", "accuracy", "affine", "learning rate", "time per step", "memory", "parameters")
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}


@dataclass(frozen=True)
class Mean:
    """Mean over seeds with its 95 % confidence interval by Student's t distribution.

    Args:
        values: one value per seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the width of the interval; ``None`` for one value."""
        n = len(self.values)
        return student_quantile(n - 1) * statistics.stdev(self.values) / math.sqrt(n) if n > 1 else None

    def exceeds(self, other: "Mean") -> bool | None:
        """Return whether the mean is higher than another one, ``None`` if the 95 % interval includes no difference.

        By Student's t test of two means with a common variance.
        """
        n, m = len(self.values), len(other.values)
        if n < 2 or m < 2:
            return None
        squares = (n - 1) * statistics.variance(self.values) + (m - 1) * statistics.variance(other.values)
        half = student_quantile(n + m - 2) * math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
        difference = self.mean - other.mean
        return None if abs(difference) <= half else difference > 0

    def text(self, n_expected: int) -> str:
        """Return percent with the interval; the number of seeds if some are missing."""
        half = self.half_width
        interval = "" if half is None else f" ± {100 * half:.2f}"
        n = len(self.values)
        return f"{100 * self.mean:.2f}{interval}" + (f" ({n} of {n_expected} seeds)" if n < n_expected else "")


@dataclass(frozen=True)
class RoutingRow:
    """A row of the table; ``None`` for what is not measured yet.

    Args:
        name: routing, variant or ``"cnn"``.
        n_seeds: number of seeds of a complete row.
        accuracy: test accuracy.
        affine: accuracy on affinely transformed test images.
        lr: selected learning rate.
        step_seconds: CPU time of a training step on one thread.
        step_bytes: peak memory of a training step above that of the network.
        parameters: number of parameters.
        diverged: whether all trainings of the grid diverged.
    """

    name: str
    n_seeds: int
    accuracy: Mean | None = None
    affine: Mean | None = None
    lr: float | None = None
    step_seconds: float | None = None
    step_bytes: int | None = None
    parameters: int | None = None
    diverged: bool = False

    def cells(self) -> list[str]:
        """Return the texts of the columns `HEADINGS`."""
        missing = DIVERGED if self.diverged else NOT_RUN
        return [
            self.name,
            *(missing if mean is None else mean.text(self.n_seeds) for mean in (self.accuracy, self.affine)),
            missing if self.lr is None else f"{self.lr:g}",
            NOT_RUN if self.step_seconds is None else f"{1e3 * self.step_seconds:.1f} ms",
            NOT_RUN if self.step_bytes is None else f"{self.step_bytes / 2**20:.0f} MiB",
            NOT_RUN if self.parameters is None else f"{self.parameters:,}",
        ]


def read_rows(directory: Path, comparison: Comparison) -> list[RoutingRow]:
    """Return the rows of a table from the records, in the order of `list_rows`.

    Args:
        directory: directory of the records of a scale.
        comparison: the data set with its network and budget.
    """
    return [_read_row(directory, comparison, name) for name in list_rows()]


def _read_row(directory: Path, comparison: Comparison, name: str) -> RoutingRow:
    """Return the row of a routing or baseline from its records; values without a record are ``None``."""
    trainings = list(iter_selected(directory, comparison, name))
    lr = selected_lr(directory, comparison, name)
    grid = [
        read_record(directory, RoutingCell(comparison, name, value, comparison.seeds[0])) for value in comparison.lrs
    ]
    cost = read_record(directory, RoutingCell(comparison, name)) or {}

    def mean_of(key: str) -> Mean | None:
        return Mean(tuple(record[key] for record in trainings)) if trainings else None

    return RoutingRow(
        name,
        len(comparison.seeds),
        accuracy=mean_of("test_accuracy"),
        affine=mean_of("affine_accuracy"),
        lr=lr,
        step_seconds=cost.get("step_seconds"),
        step_bytes=cost.get("step_bytes"),
        parameters=cost.get("parameters"),
        diverged=lr is None and all(grid),
    )


# Page -----------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Comparison of routings

Every routing of torchcaps in the same small network, with the same data and the same number of training steps, next to
uniform couplings (no routing) and to a plain convolutional network with as many parameters. This page is written by
`torchcaps bench routings` from the records in `results/bench/routings/`; cells without a record are marked "not run".

```sh
torchcaps bench routings                              # measure what is missing, then write this page; Ctrl-C is safe
torchcaps bench routings --plan                       # list what is missing
torchcaps bench routings --report                     # write this page from the records
torchcaps bench routings --data mnist --rows em,cnn   # a selection
```

The network is `capsnet_images` with {types} types of squashed primary capsules of dimension {primary_dim} and class
capsules of dimension {dim}. The loss follows from the routing: margin loss for lengths, spread loss for activations,
cross-entropy for logits. Adam (beta2 0.99), one cycle of the learning rate, batches of 64 images. A tenth of the
training images is the validation set. For each row the learning rate is that with the highest validation accuracy of
seed 0, of those listed; then seeds 1 and 2 are trained with it. Nothing is selected on the test set.

- accuracy: percent of the test images, mean of three seeds and its 95 % interval by Student's t distribution.
- affine: the same for test images that are rotated by up to 20 degrees, scaled by 0.8 to 1.2, sheared by up to 0.2 and
  shifted by up to a tenth of their side, none of which (but shifts of two pixels on MNIST, of four pixels and flips on
  CIFAR-10) occurs in training. The transformation of an image is the same in all rows.
- time per step: CPU time of a training step with 64 images on one thread. Memory: its peak above that of the network.

These are small networks and short trainings on two CPU cores. They order routings by how easily they train, not by what
large networks reach after days.
"""


def render_page(directory: Path, comparisons: tuple[Comparison, ...], figure: str | None = None) -> str:
    """Return the documentation page as Markdown.

    Args:
        directory: directory of the records of a scale.
        comparisons: data sets with their networks and budgets.
        figure: path of the figure, relative to the page.
    """
    parts = [INTRODUCTION.format(types=TYPES, primary_dim=PRIMARY_DIM, dim=DIM)]
    if figure is not None:
        parts.append(f"![Accuracy of each routing on test images and on affinely transformed ones]({figure})\n")
    for comparison in comparisons:
        parts.append(_render_table(directory, comparison))
    return "\n".join(parts)


def _render_table(directory: Path, comparison: Comparison) -> str:
    """Return the section of one data set."""
    lrs = ", ".join(f"{lr:g}" for lr in comparison.lrs)
    channels, cnn = (", ".join(map(str, c)) for c in (comparison.channels, baseline_channels(comparison)))
    n_pending = len(pending_cells(directory, [comparison], list_rows()))
    lines = [
        f"## {TITLES.get(comparison.data, comparison.data)}",
        "",
        f"{comparison.steps:,} steps; convolutions with {channels} channels, those of the plain CNN with {cnn}; "
        f"learning rates {lrs}." + (f" {n_pending} cells are not measured yet." if n_pending else ""),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    for row in read_rows(directory, comparison):
        name, *others = row.cells()
        lines.append("| " + " | ".join(["plain CNN" if name == CNN else f"`{name}`", *others]) + " |")
    return "\n".join([*lines, *_render_comparison(read_rows(directory, comparison), comparison)]) + "\n"


def _render_comparison(rows: list[RoutingRow], comparison: Comparison) -> Iterator[str]:
    """Yield the sentences below a table: rows unlike uniform couplings, and rates at an end of the grid."""
    complete = [row for row in rows if row.accuracy and row.affine and len(row.accuracy.values) == row.n_seeds > 1]
    uniform = next((row for row in complete if row.name == UNIFORM), None)
    others = [row for row in complete if row.name != UNIFORM]
    if uniform is None or not others:
        return
    yield ""
    yield (
        f"Differences from uniform couplings whose 95 % interval excludes zero (Student's t, {uniform.n_seeds} seeds "
        f"each; of {len(others)} comparisons without any difference one in twenty would do so):"
    )
    yield ""
    for title, field in (("accuracy", "accuracy"), ("affine", "affine")):
        verdicts = {row.name: getattr(row, field).exceeds(getattr(uniform, field)) for row in others}
        higher, lower = ([name for name in verdicts if verdicts[name] is kind] for kind in (True, False))
        yield f"- {title}: higher with {_enumerate(higher)}; lower with {_enumerate(lower)}."
    losses = {
        row.name: RoutingCell(comparison, row.name, comparison.lrs[0], 0).spec().recipe.loss.name for row in complete
    }
    groups = [(loss, [name for name in losses if losses[name] == loss]) for loss in sorted(set(losses.values()))]
    by_loss = "; ".join(f"{loss.replace('_', '-')}: {_enumerate(names)}" for loss, names in groups)
    yield f"- Rows with different losses can differ because of these. {by_loss[0].upper()}{by_loss[1:]}."
    ends = [row.name for row in complete if row.lr in (min(comparison.lrs), max(comparison.lrs))]
    if ends:
        yield f"- The learning rate is at an end of the grid, so that one beyond it may be better: {_enumerate(ends)}."


def _enumerate(names: list[str]) -> str:
    """Return names as a phrase."""
    return ", ".join(map(_label, names)) or "none"


def _label(name: str) -> str:
    """Return the name of a row in Markdown."""
    return "the plain CNN" if name == CNN else f"`{name}`"


def draw_routings(directory: Path, comparisons: tuple[Comparison, ...], out: Path) -> bool:
    """Draw accuracy and accuracy under affine transformations of the measured rows; return whether there are any."""
    tables = [(c, [row for row in read_rows(directory, c) if row.accuracy is not None]) for c in comparisons]
    tables = [(comparison, rows) for comparison, rows in tables if rows]
    if not tables:
        return False
    height = 1.2 + 0.28 * max(len(rows) for _, rows in tables)
    figure = new_figure(4.6 * len(tables) + 0.6, height)
    for axes, (comparison, rows) in zip(figure.subplots(1, len(tables), squeeze=False).flat, tables, strict=True):
        rows = sorted(rows, key=lambda row: row.accuracy.mean if row.accuracy else 0.0)
        for index, (label, field) in enumerate((("test images", "accuracy"), ("affinely transformed", "affine"))):
            means = [getattr(row, field) for row in rows]
            axes.errorbar(
                [100 * mean.mean for mean in means],
                range(len(rows)),
                xerr=[100 * (mean.half_width or 0.0) for mean in means],
                fmt=MARKERS[index],
                color=COLORS[index],
                markersize=4,
                elinewidth=0.8,
                label=label,
            )
        axes.set_yticks(range(len(rows)), ["plain CNN" if row.name == CNN else row.name for row in rows])
        title = f"{TITLES.get(comparison.data, comparison.data)}, {comparison.steps:,} steps"
        style_axes(axes, title, "accuracy, percent")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    save_figure(figure, out)
    return True
