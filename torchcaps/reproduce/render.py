"""Rendering of an item: Markdown table with verdicts, and figure."""

import math
from collections.abc import Sequence
from pathlib import Path

from torchcaps._core.files import write_atomic
from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.reproduce.scales import Scale
from torchcaps.reproduce.schema import Cell, Item, Paper
from torchcaps.reproduce.statistics import Estimate, Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, VerdictReason, verdicts
from torchcaps.training.errors import RunError

__all__ = [
    "count_noun",
    "count_numbers",
    "describe_verdict",
    "draw_points",
    "format_estimate",
    "format_number",
    "format_published",
    "format_two_digits",
    "has_results",
    "item_lines",
    "item_path",
    "render_item",
    "table_line",
    "table_lines",
    "write_item",
]

DECIMALS = {"test error, %": 2, "test accuracy, %": 2, "parameters": 0}  # by unit
SIGNIFICANT_DIGITS = 3  # of the other units
VERDICT_TEXT = {
    VerdictKind.HOLDS: "holds",
    VerdictKind.CONTRADICTED: "contradicted",
    VerdictKind.TOO_SHORT: "too short to judge",
    VerdictKind.UNDECIDED: "undecided",
    VerdictKind.NOT_JUDGED: "not judged",
    VerdictKind.NOT_RUN: "not run",
}
REASON_TEXT = {
    VerdictReason.ONE_SEED: "one seed",
    VerdictReason.NO_INTERVAL: "one measurement without interval",
    VerdictReason.INTERVAL_INCLUDES_ZERO: "the interval includes zero",
    VerdictReason.HALF_LENGTH_MISSING: "no runs of half the length",
    VerdictReason.HALF_LENGTH_OTHER_SIGN: "other sign at half length",
    VerdictReason.STILL_CHANGING: "still changing with training",
    VerdictReason.NEAR_CHANCE: "nearer to chance than to the published number",
    VerdictReason.AT_CHANCE: "at chance",
    VerdictReason.DIVERGED: "diverged",
}


def format_published(cell: Cell, unit: str) -> str:
    """Return the published number of a cell as text; empty if there is none."""
    printed = cell.printed
    if printed is None:
        return ""
    number = f"{printed.value / 1e6:.4g}M" if unit == "parameters" else f"{printed.value:g}"
    number = f"{printed.value:,.0f}" if unit == "numbers" else number
    return number + (f" ± {printed.spread:g}" if printed.spread is not None else "")


def format_estimate(estimate: Estimate | None, unit: str) -> str:
    """Return our number as text, with its interval and the number of seeds."""
    if estimate is None:
        return "not run"
    if unit == "parameters":
        return f"{estimate.mean:,.0f}"
    if estimate.seeds == 0:
        return f"diverged ({estimate.diverged} of {estimate.diverged})"
    text = format_number(estimate.mean, unit)
    if estimate.low < estimate.high:
        text += f" ({format_number(estimate.low, unit)} to {format_number(estimate.high, unit)})"
    text += "" if estimate.seed_independent else f", {estimate.seeds} seed{'s' * (estimate.seeds > 1)}"
    return text + (f", {estimate.diverged} more diverged" if estimate.diverged else "")


def format_number(number: float, unit: str) -> str:
    """Return a number with the decimals of its unit, otherwise with `SIGNIFICANT_DIGITS`."""
    if unit == "numbers":
        return f"{number:,.0f}"
    if unit in DECIMALS:
        return f"{number:.{DECIMALS[unit]}f}"
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:.{max(0, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(number))))}f}"


def describe_verdict(verdict: Verdict, scale: Scale | None = None) -> str:
    """Return a verdict as text: ``"holds: CapsNet is better (by 0.31 ± 0.12, 2 seeds; ...)"``, with a given scale."""
    reason = "" if verdict.reason is None else f" ({REASON_TEXT[verdict.reason]})"
    text = f"{VERDICT_TEXT[verdict.kind]}{reason}: {'(ours) ' * (verdict.claim.origin == 'ours')}"
    text += verdict.claim.statement
    at_scale = [] if scale is None else [f"scale {scale}"]
    if verdict.difference is None or verdict.kind is VerdictKind.NOT_JUDGED:
        return f"{text} ({at_scale[0]})" if at_scale and verdict.kind is not VerdictKind.NOT_RUN else text
    interval = f" ± {format_two_digits(verdict.half_width)}" if verdict.half_width else ""
    margin = f" with a margin of {verdict.claim.margin:g}" if verdict.claim.margin else ""
    seeds = f", {count_noun(verdict.seeds, 'seed')}" if verdict.seeds else ""
    details = [*at_scale, f"by {format_two_digits(verdict.difference)}{interval}{margin}{seeds}"]
    if verdict.half is not None:
        half = verdict.half
        details.append(f"at half length by {format_two_digits(half.difference)}, {count_noun(half.seeds, 'seed')}")
        changes = " and ".join(format_two_digits(change) for change in (half.better_change, half.worse_change))
        details.append(f"from half to full length the two improved by {changes}")
    if verdict.claim.convergence_reason:
        details.append(f"independent of the training length: {verdict.claim.convergence_reason}")
    return f"{text} ({'; '.join(details)})"


def format_two_digits(number: float) -> str:
    """Return a number with two significant digits; large ones as an int."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.2g}"


def count_noun(n: int, noun: str) -> str:
    """Return a number with its noun: ``"1 seed"``, ``"2 seeds"``."""
    return f"{n} {noun}{'s' * (n != 1)}"


def render_item(paper: Paper, item: Item, store: RecordStore, heading: bool = True) -> str:
    """Return an item as Markdown: table, verdicts on its claims, footnotes and notes."""
    judged: list[tuple[Scale, Verdict]] = [(store.scale, verdict) for verdict in verdicts(Results(item, store))]
    return "\n".join(item_lines(paper, item, store, judged, heading))


def item_lines(
    paper: Paper, item: Item, store: RecordStore, judged: list[tuple[Scale, Verdict]], heading: bool = True
) -> list[str]:
    """Return an item as lines of Markdown: the table of a store, then verdicts, each with the scale of its numbers."""
    lines = [f"### {paper.name}, {item.title}", ""] if heading else []
    lines += [f"{item.description} Scale: {store.scale}.", ""]
    footnotes: list[str] = []
    lines += table_lines(item, store, footnotes)
    if store.scale == "smoke":
        lines += ["The scale smoke checks that everything runs. Its numbers are meaningless: no claim is judged.", ""]
    elif any(verdict.kind is not VerdictKind.NOT_RUN for _, verdict in judged):
        texts = [describe_verdict(verdict, scale if scale != store.scale else None) for scale, verdict in judged]
        lines += ["Claims, judged by our numbers:", "", *(f"- {text}" for text in texts), ""]
    lines += [f"[{index}] {note}  " for index, note in enumerate(footnotes, start=1)] + [""] * bool(footnotes)
    return lines + [f"- {note}" for note in item.notes] + [""] * bool(item.notes)


def table_lines(item: Item, store: RecordStore, footnotes: list[str], only_run: bool = False) -> list[str]:
    """Return the lines of a table; each column is split into published numbers and ours, if there are any.

    Notes on published numbers that are not in ``footnotes`` are appended to it. With ``only_run`` the table has only
    rows with a run of ours, and a sentence about the others.
    """
    if not item.rows:
        return []
    results = Results(item, store)
    rows = [row for row in item.rows if not only_run or any(_has_run(results, c) for c in row.cells.values())]
    if not rows:
        return []
    header, columns = [""], []
    for name, unit in item.columns.items():
        cells = [row.cells[name] for row in rows if name in row.cells]
        suffix = f" ({unit})" if unit else ""
        if any(cell.printed is not None for cell in cells):
            header.append(f"{name}, published{suffix}")
            columns.append((name, unit, False))
        if any(cell.source is not None and (not only_run or _has_run(results, cell)) for cell in cells):
            header.append(f"{name}, ours{suffix}")
            columns.append((name, unit, True))
    lines = [table_line(header), "|---" * len(header) + "|"]
    for row in rows:
        texts = [row.label]
        for name, unit, is_ours in columns:
            cell = row.cells.get(name)
            if cell is None:
                texts.append("")
            elif is_ours:
                texts.append(format_estimate(results.estimate(cell), unit) if cell.source is not None else "")
            else:
                texts.append(format_published(cell, unit) + _footnote_mark(cell, footnotes))
        lines.append(table_line(texts))
    if len(rows) < len(item.rows):
        lines += ["", f"Run at this scale: {len(rows)} of {len(item.rows)} rows."]
    return [*lines, ""]


def _footnote_mark(cell: Cell, footnotes: list[str]) -> str:
    """Return the mark of a cell's footnote and append the note to ``footnotes`` if it is new."""
    if cell.printed is None or not cell.printed.note:
        return ""
    if cell.printed.note not in footnotes:
        footnotes.append(cell.printed.note)
    return f" [{footnotes.index(cell.printed.note) + 1}]"


def table_line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def item_path(paper: Paper, item: Item, store: RecordStore, suffix: str) -> Path:
    """Return the path of an item's table (``".md"``) or figure (``".png"``)."""
    return store.results / f"{paper.name}-{item.name}{suffix}"


def has_results(item: Item, store: RecordStore) -> bool:
    """Return whether anything of an item has run."""
    results = Results(item, store)
    return count_numbers(item, store) > 0 or any(results.first(one) is not None for one in item.measurements)


def count_numbers(item: Item, store: RecordStore) -> int:
    """Return the number of cells of a table with a run or measurement of ours."""
    results = Results(item, store)
    return sum(_has_run(results, cell) for row in item.rows for cell in row.cells.values())


def _has_run(results: Results, cell: Cell) -> bool:
    """Return whether a cell has a record, also of a run that diverged; parameter counts need none."""
    estimate = results.estimate(cell)
    return estimate is not None and estimate.seeds + estimate.diverged > 0


def write_item(paper: Paper, item: Item, store: RecordStore) -> list[Path]:
    """Write table and figure of an item from the existing records; return the paths.

    Without records nothing is written, and files of records that were removed are deleted.
    """
    table, figure = (item_path(paper, item, store, suffix) for suffix in (".md", ".png"))
    if not has_results(item, store):
        render_item(paper, item, store)  # raises if the item itself is not valid
        for path in (table, figure):
            path.unlink(missing_ok=True)
        return []
    write_atomic(table, render_item(paper, item, store), RunError, sweep=True)
    (item.draw or draw_points)(Results(item, store), figure)
    return [table, figure] if figure.exists() else [table]  # a figure may need records that are still missing


def draw_points(results: Results, out: Path) -> None:
    """Draw our numbers with intervals next to the published ones: one panel per column, one line per row."""
    item = results.item
    columns = [
        (name, unit)
        for name, unit in item.columns.items()
        if unit != "parameters" and any(_has_seeds(results, row.cells.get(name)) for row in item.rows)
    ]
    if not columns:
        return
    rows = [row for row in item.rows if any(name in row.cells for name, _ in columns)]
    figure = new_figure(3.2 + 3.2 * len(columns), 1.7 + 0.32 * len(rows))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (name, unit) in zip(panels, columns, strict=True):
        for index, row in enumerate(rows):
            cell = row.cells.get(name)
            if cell is None:
                continue
            estimate = results.estimate(cell)
            if estimate is not None and estimate.seeds:
                errors = [[estimate.mean - estimate.low], [estimate.high - estimate.mean]]
                style = {"color": COLORS[0], "marker": MARKERS[0], "capsize": 3, "linestyle": "", "label": "ours"}
                axes.errorbar(estimate.mean, index, xerr=errors, **style)
            if cell.printed is not None:
                style = {"color": COLORS[1], "marker": MARKERS[3], "markerfacecolor": "none", "linestyle": ""}
                axes.plot(cell.printed.value, index, **style, label="published")
        style_axes(axes, name, unit)
    panels[0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)  # first row on top
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{item.title}, scale {results.store.scale}: means and 95 % intervals", fontsize=11)
    save_figure(figure, out)


def _has_seeds(results: Results, cell: Cell | None) -> bool:
    return cell is not None and (estimate := results.estimate(cell)) is not None and estimate.seeds > 0
