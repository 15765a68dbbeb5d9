"""Tables and claims as Markdown: ours beside the paper's."""

import math

from torchcaps.reproduce.schema import Cell, Item, Paper
from torchcaps.reproduce.statistics import Results, Value
from torchcaps.reproduce.store import Store

__all__ = ["item_text", "ours", "published"]

DIGITS = {"test error, %": 2, "test accuracy, %": 2, "parameters": 0}


def published(cell: Cell, unit: str) -> str:
    """Return what the paper prints."""
    printed = cell.printed
    if printed is None:
        return ""
    number = f"{printed.value / 1e6:.4g}M" if unit == "parameters" else f"{printed.value:g}"
    number = f"{printed.value:,.0f}" if unit == "numbers" else number
    return number + (f" ± {printed.spread:g}" if printed.spread is not None else "")


def ours(value: Value | None, unit: str) -> str:
    """Return our number with its interval and the seeds, or what became of it."""
    if value is None:
        return "not run"
    if unit == "parameters":
        return f"{value.mean:,.0f}"
    if value.seeds == 0:
        return f"diverged ({value.diverged} of {value.diverged})"
    words = _figure(value.mean, unit)
    if value.low < value.high:
        words += f" ({_figure(value.low, unit)} to {_figure(value.high, unit)})"
    words += "" if value.once else f", {value.seeds} seed{'s' * (value.seeds > 1)}"
    return words + (f", {value.diverged} more diverged" if value.diverged else "")


def _figure(number: float, unit: str) -> str:
    if unit == "numbers":
        return f"{number:,.0f}"
    if unit in DIGITS:
        return f"{number:.{DIGITS[unit]}f}"
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"


def item_text(paper: Paper, item: Item, store: Store, heading: bool = True) -> str:
    """Return an item's table, what its claims come to, and its notes."""
    results = Results(item, store)
    lines = [f"### {paper.name}, {item.title}", ""] if heading else []
    lines += [f"{item.about} Scale: {store.scale}.", ""]
    notes: list[str] = []
    if item.rows:
        lines += _table(item, results, notes)
    if store.scale == "smoke":
        lines += ["At the scale smoke all parts have worked, and no number means anything: claims are not judged.", ""]
    elif any(verdict.word != "not run" for verdict in results.verdicts()):
        lines += ["Claims, by our numbers:", ""]
        lines += [f"- {verdict}" for verdict in results.verdicts()] + [""]
    lines += [f"[{number}] {note}  " for number, note in enumerate(notes, start=1)] + ([""] if notes else [])
    lines += [f"- {note}" for note in item.notes] + ([""] if item.notes else [])
    return "\n".join(lines)


def _table(item: Item, results: Results, notes: list[str]) -> list[str]:
    """Return the rows: for each column what is published, where anything is, and ours."""
    heads, kinds = [""], []
    for name, unit in item.columns.items():
        cells = [row.cells[name] for row in item.rows if name in row.cells]
        if any(cell.printed is not None for cell in cells):
            heads.append(f"{name}, published{_in(unit)}")
            kinds.append((name, unit, False))
        if any(cell.source is not None for cell in cells):
            heads.append(f"{name}, ours{_in(unit)}")
            kinds.append((name, unit, True))
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in item.rows:
        words = [row.label]
        for name, unit, is_ours in kinds:
            cell = row.cells.get(name)
            if cell is None:
                words.append("")
            elif is_ours:
                words.append(ours(results.value(cell), unit) if cell.source is not None else "")
            else:
                mark = ""
                if cell.printed is not None and cell.printed.note:
                    if cell.printed.note not in notes:
                        notes.append(cell.printed.note)
                    mark = f" [{notes.index(cell.printed.note) + 1}]"
                words.append(published(cell, unit) + mark)
        lines.append(_line(words))
    return [*lines, ""]


def _in(unit: str) -> str:
    return f" ({unit})" if unit else ""


def _line(cells: list[str]) -> str:
    """Return a row; what would end a cell is written so that it does not."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
