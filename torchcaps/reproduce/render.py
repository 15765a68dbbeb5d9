"""Rendering of results: Markdown tables with verdicts, figures, and the combined report."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from torchcaps._core.files import write_atomic
from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.reproduce.schema import Cell, Item, Paper
from torchcaps.reproduce.statistics import Estimate, Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, VerdictReason, verdicts
from torchcaps.training.errors import RunError

__all__ = [
    "FINDINGS_DIRECTORY",
    "describe_verdict",
    "draw_points",
    "format_estimate",
    "format_published",
    "has_results",
    "item_path",
    "render_item",
    "write_item",
    "write_report",
]

FINDINGS_DIRECTORY = "findings"  # next to the records: our conclusions, written by hand, one file per item
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
    VerdictReason.AT_CHANCE: "at chance",
    VerdictReason.DIVERGED: "diverged",
}
REPORT_HEADER = """\
# Reproduced results

Every table and figure of the papers that was run, at the scale `{scale}`, next to the published numbers. Written
by `{command}` from the records in `{results}`; each record has the configuration, seed, learning curve, duration,
machine and command. A number is a mean over seeds with its 95 % confidence interval, which combines that of the test
images and that of the mean over seeds in quadrature. "not run" means that nothing was run; no number is copied.

A claim of a paper **holds** or is **contradicted** only if all of the following is true:

- Both numbers are means over two seeds or more. Measurements that do not depend on a seed are exempt.
- The 95 % interval of their difference excludes zero. Runs that were tested on the same images are compared image by
  image. The variance between seeds is estimated from the rows of a column that have several seeds.
- Training has converged: runs of half the length, each with a complete schedule of its own, give a difference of the
  same sign, and from half to full length neither number changes by as much as the difference. Measurements on trained
  networks are repeated on the half-length networks. Costs, parameter counts and the like are exempt; the reason is
  stated.

It is **undecided** if one of the first two is false, and **too short to judge** if only the third is, or if half-length
runs are missing. Nothing is concluded from a network whose accuracy is not significantly above that of a constant
prediction, nor from a run that diverged: **not judged**.

At the scale `cpu` networks are narrower and have fewer images and epochs than in the papers, in the same way for all
rows of a table: absolute numbers are not comparable with the published ones.
"""


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
    text = _format_number(estimate.mean, unit)
    if estimate.low < estimate.high:
        text += f" ({_format_number(estimate.low, unit)} to {_format_number(estimate.high, unit)})"
    text += "" if estimate.seed_independent else f", {estimate.seeds} seed{'s' * (estimate.seeds > 1)}"
    return text + (f", {estimate.diverged} more diverged" if estimate.diverged else "")


def _format_number(number: float, unit: str) -> str:
    """Return a number with the decimals of its unit, otherwise with `SIGNIFICANT_DIGITS`."""
    if unit == "numbers":
        return f"{number:,.0f}"
    if unit in DECIMALS:
        return f"{number:.{DECIMALS[unit]}f}"
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:.{max(0, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(number))))}f}"


def describe_verdict(verdict: Verdict) -> str:
    """Return a verdict as text: ``"holds: CapsNet is better (by 0.31 ± 0.12, 2 seeds; ...)"``."""
    reason = "" if verdict.reason is None else f" ({REASON_TEXT[verdict.reason]})"
    text = f"{VERDICT_TEXT[verdict.kind]}{reason}: {verdict.claim.text}"
    if verdict.difference is None or verdict.kind is VerdictKind.NOT_JUDGED:
        return text
    interval = f" ± {verdict.half_width:.2g}" if verdict.half_width else ""
    margin = f" with a margin of {verdict.claim.margin:g}" if verdict.claim.margin else ""
    seeds = f", {_count(verdict.seeds, 'seed')}" if verdict.seeds else ""
    details = [f"by {verdict.difference:.2g}{interval}{margin}{seeds}"]
    if verdict.half is not None:
        half = verdict.half
        details.append(f"at half length by {half.difference:.2g}, {_count(half.seeds, 'seed')}")
        changes = f"{half.better_change:.2g} and {half.worse_change:.2g}"
        details.append(f"from half to full length the two improved by {changes}")
    if verdict.claim.convergence_reason:
        details.append(f"independent of the training length: {verdict.claim.convergence_reason}")
    return f"{text} ({'; '.join(details)})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def render_item(paper: Paper, item: Item, store: RecordStore, heading: bool = True) -> str:
    """Return an item as Markdown: table, verdicts on its claims, footnotes and notes."""
    results = Results(item, store)
    lines = [f"### {paper.name}, {item.title}", ""] if heading else []
    lines += [f"{item.description} Scale: {store.scale}.", ""]
    footnotes: list[str] = []
    if item.rows:
        lines += _table_lines(item, results, footnotes)
    judged = verdicts(results)
    if store.scale == "smoke":
        lines += ["The scale smoke checks that everything runs. Its numbers are meaningless: no claim is judged.", ""]
    elif any(verdict.kind is not VerdictKind.NOT_RUN for verdict in judged):
        lines += ["Claims, judged by our numbers:", "", *(f"- {describe_verdict(verdict)}" for verdict in judged), ""]
    lines += [f"[{index}] {note}  " for index, note in enumerate(footnotes, start=1)] + [""] * bool(footnotes)
    lines += [f"- {note}" for note in item.notes] + [""] * bool(item.notes)
    return "\n".join(lines)


def _table_lines(item: Item, results: Results, footnotes: list[str]) -> list[str]:
    """Return the lines of a table; each column is split into published numbers and ours, if there are any."""
    header, columns = [""], []
    for name, unit in item.columns.items():
        cells = [row.cells[name] for row in item.rows if name in row.cells]
        suffix = f" ({unit})" if unit else ""
        if any(cell.printed is not None for cell in cells):
            header.append(f"{name}, published{suffix}")
            columns.append((name, unit, False))
        if any(cell.source is not None for cell in cells):
            header.append(f"{name}, ours{suffix}")
            columns.append((name, unit, True))
    lines = [_table_line(header), "|---" * len(header) + "|"]
    for row in item.rows:
        texts = [row.label]
        for name, unit, is_ours in columns:
            cell = row.cells.get(name)
            if cell is None:
                texts.append("")
            elif is_ours:
                texts.append(format_estimate(results.estimate(cell), unit) if cell.source is not None else "")
            else:
                texts.append(format_published(cell, unit) + _footnote_mark(cell, footnotes))
        lines.append(_table_line(texts))
    return [*lines, ""]


def _footnote_mark(cell: Cell, footnotes: list[str]) -> str:
    """Return the mark of a cell's footnote and append the note to ``footnotes`` if it is new."""
    if cell.printed is None or not cell.printed.note:
        return ""
    if cell.printed.note not in footnotes:
        footnotes.append(cell.printed.note)
    return f" [{footnotes.index(cell.printed.note) + 1}]"


def _table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def item_path(paper: Paper, item: Item, store: RecordStore, suffix: str) -> Path:
    """Return the path of an item's table (``".md"``) or figure (``".png"``)."""
    return store.results / f"{paper.name}-{item.name}{suffix}"


def has_results(item: Item, store: RecordStore) -> bool:
    """Return whether anything of an item has run."""
    results = Results(item, store)
    cells = [cell for row in item.rows for cell in row.cells.values()]
    if any((estimate := results.estimate(cell)) is not None and estimate.seeds + estimate.diverged for cell in cells):
        return True
    return any(results.first(measurement) is not None for measurement in item.measurements)


def write_item(paper: Paper, item: Item, store: RecordStore) -> list[Path]:
    """Write table and figure of an item from the existing records; return the paths."""
    table, figure = (item_path(paper, item, store, suffix) for suffix in (".md", ".png"))
    write_atomic(table, render_item(paper, item, store), RunError, sweep=True)
    if not has_results(item, store):
        figure.unlink(missing_ok=True)  # of records that were removed
        return [table]
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


def write_report(
    papers: Sequence[Paper], store: RecordStore, out: Path, command: str, update_items: bool = True
) -> Path:
    """Write the combined Markdown report and return its path.

    Args:
        papers: the papers, in order.
        store: the records.
        out: path of the report.
        command: the command line, printed in the report.
        update_items: also write the table and figure of each item.
    """
    findings = store.results / FINDINGS_DIRECTORY
    parts = [REPORT_HEADER.format(scale=store.scale, command=command, results=store.results)]
    summary = findings / "summary.md"
    if summary.exists():
        parts.append(summary.read_text(encoding="utf-8").strip() + "\n")
    parts += [_render_paper(paper, store, out, update_items) for paper in papers]
    write_atomic(out, "\n".join(parts), RunError, sweep=True)
    return out


def _render_paper(paper: Paper, store: RecordStore, out: Path, update_items: bool) -> str:
    """Return all items of a paper as Markdown; report items with unreadable records in ``store.problems``."""
    lines = [f"## {paper.name}", "", paper.citation, "", f"The paper's claims: {paper.summary}", ""]
    lines += [f"At the scale `cpu`: {paper.cpu_scale}", ""]
    for item in paper.items:
        try:
            if update_items:
                write_item(paper, item, store)
            lines += _report_lines(paper, item, store, out)
        except RunError:  # a file that can't be written, or a record that must not be skipped
            raise
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if not store.skip_unreadable:
                raise
            directory = store.results / "measurements"
            store.problems[f"{paper.name} {item.name}"] = (
                f"{paper.name}, {item.title} can't be rendered ({type(error).__name__}: {error}): remove its records "
                f"in {directory} and run 'torchcaps reproduce {paper.name} {item.name}' again"
            )
            lines += [f"### {paper.name}, {item.title}", "", "Its records are not readable.", ""]
    return "\n".join(lines)


def _report_lines(paper: Paper, item: Item, store: RecordStore, out: Path) -> list[str]:
    """Return the part of the report for an item: table, figure, findings, cost and command."""
    command = f"`torchcaps reproduce {paper.name} {item.name} --scale {store.scale}`"
    lines = [render_item(paper, item, store)]
    if not has_results(item, store):
        return [*lines, f"Not run: {command}", ""]
    figure = item_path(paper, item, store, ".png")
    if figure.exists():
        lines += [f"![{item.title}]({os.path.relpath(figure, out.parent)})", ""]
    findings = store.results / FINDINGS_DIRECTORY / f"{paper.name}-{item.name}.md"
    if findings.exists():
        lines += [findings.read_text(encoding="utf-8").strip(), ""]
    return [*lines, f"{_describe_cost(item, store)} Command: {command}", ""]


def _describe_cost(item: Item, store: RecordStore) -> str:
    """Return the number of records and the minutes they took; records shared by items are counted in each."""
    results = Results(item, store)
    sources = [*item.sources(), *item.half_length_sources()]
    records = [record for source in sources for _, record in results.records(source)]
    seconds = sum(record["results"].get("seconds") or record.get("seconds") or 0.0 for record in records)
    threads = sorted({record["machine"].get("threads", 1) for record in records}) or [1]
    cores = f"{threads[0]} thread{'s' * (threads[0] > 1)}" if len(threads) == 1 else "one or more threads"
    return f"{_count(len(records), 'record')}, {seconds / 60:.0f} minutes on {cores}."
