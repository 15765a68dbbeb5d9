"""The files of an item: its table as Markdown, its figure as PNG and SVG."""

from pathlib import Path

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.reproduce.markdown import item_text
from torchcaps.reproduce.schema import Cell, Item, Paper
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import Store, write_whole

__all__ = ["draw_points", "figure_path", "has_results", "write_item"]


def figure_path(paper: Paper, item: Item, store: Store, ending: str = ".png") -> Path:
    """Return where the figure of an item is."""
    return store.results / f"{paper.name}-{item.name}{ending}"


def has_results(item: Item, store: Store) -> bool:
    """Return whether anything of an item ran, or was counted."""
    results = Results(item, store)
    cells = [cell for row in item.rows for cell in row.cells.values()]
    if any((value := results.value(cell)) is not None and value.seeds + value.diverged for cell in cells):
        return True
    return any(results.first(measure) is not None for measure in item.measures)


def write_item(paper: Paper, item: Item, store: Store) -> list[Path]:
    """Write the table and the figure of an item from the records that there are; return the paths."""
    table = figure_path(paper, item, store, ".md")
    write_whole(table, item_text(paper, item, store).encode())
    written = [table]
    drawn = has_results(item, store)
    for ending in (".png", ".svg"):
        out = figure_path(paper, item, store, ending)
        if not drawn:
            out.unlink(missing_ok=True)  # of records that are gone
        else:
            (item.draw or draw_points)(Results(item, store), out)
            written += [out] if out.exists() else []  # what it would show may not be there yet
    return written


def draw_points(results: Results, out: Path) -> None:
    """Draw ours with intervals beside what was published: a panel for each column, a line for each row."""
    item = results.item
    columns = [
        (name, unit)
        for name, unit in item.columns.items()
        if unit != "parameters" and any(_found(results, row.cells.get(name)) for row in item.rows)
    ]
    if not columns:
        return
    rows = [row for row in item.rows if any(name in row.cells for name, _ in columns)]
    height = 1.7 + 0.32 * len(rows)
    figure = new_figure(3.2 + 3.2 * len(columns), height)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (name, unit) in zip(panels, columns, strict=True):
        named: set[str] = set()  # in the legend
        for place, row in enumerate(rows):
            cell = row.cells.get(name)
            if cell is None:
                continue
            value = results.value(cell)
            if value is not None and value.seeds:
                axes.errorbar(
                    value.mean,
                    place,
                    xerr=[[value.mean - value.low], [value.high - value.mean]],
                    color=COLORS[0],
                    marker=MARKERS[0],
                    capsize=3,
                    linestyle="",
                    label=_once("ours", named),
                )
            if cell.printed is not None:
                axes.plot(
                    cell.printed.value,
                    place,
                    color=COLORS[1],
                    marker=MARKERS[3],
                    markerfacecolor="none",
                    linestyle="",
                    label=_once("published", named),
                )
        style_axes(axes, name, unit)
    panels[0].set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)  # the first row above, and no mark cut off
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{item.title}, scale {results.store.scale}: means and 95 % intervals", fontsize=11)
    save_figure(figure, out)


def _found(results: Results, cell: Cell | None) -> bool:
    return cell is not None and (value := results.value(cell)) is not None and value.seeds > 0


def _once(word: str, named: set[str]) -> str | None:
    """Return a word for the legend the first time."""
    if word in named:
        return None
    named.add(word)
    return word
