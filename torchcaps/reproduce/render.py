"""The whole on one page: every table and figure, ours beside what was published."""

import os
from pathlib import Path

from torchcaps.papers.registry import list_papers
from torchcaps.reproduce.markdown import item_text
from torchcaps.reproduce.outputs import figure_path, has_results, write_item
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import Store, write_whole
from torchcaps.training.errors import RunError

__all__ = ["write_report"]

FINDINGS = "findings"  # a folder beside the records: what we make of them, written by hand, one file for each item
HEAD = """\
# The papers, run again

Every table and figure of the five papers that ran here, at the scale `{scale}`, beside what was published. Written by
`{command}` from the records in `{results}`; each number there has its configuration, seed, curve, time and machine, and
the command that makes it again. A number stands with its 95 % interval (that of the share on the test images, and of
the mean over seeds, added in squares) and the number of seeds. "not run" means that nothing ran: nothing is copied.

A claim of a paper **holds** where the interval of the difference excludes zero, is **contradicted** where it does so on
the other side, and is **undecided** otherwise; runs that were tested on the same images are compared image by image.
What another seed would change is known from those rows of a column that have several; where none has, the interval is
that of the images alone, and says nothing of another training. "With one seed" means that one of the two has no more.
At the scale `cpu` nets are narrower, images and epochs fewer than in the papers, alike for all rows of a table:
absolute numbers are not comparable with the published ones, differences between rows are what there is to see.
"""


def write_report(store: Store, out: Path, command: str, figures: bool = True) -> Path:
    """Write the page and, unless ``figures`` are to stay as they are, all tables and figures; return where it is."""
    findings = store.results / FINDINGS
    parts = [HEAD.format(scale=store.scale, command=command, results=store.results)]
    summary = findings / "summary.md"
    if summary.exists():
        parts.append(summary.read_text(encoding="utf-8").strip() + "\n")
    for paper in list_papers():
        parts.append(_paper_text(paper, store, out, findings, figures))
    write_whole(out, "\n".join(parts).encode())
    return out


def _paper_text(paper: Paper, store: Store, out: Path, findings: Path, figures: bool) -> str:
    lines = [f"## {paper.name}", "", paper.citation, "", f"Claimed: {paper.claimed}", ""]
    lines += [f"At the scale `cpu`: {paper.scale}", ""]
    for item in paper.items:
        try:
            if figures:
                write_item(paper, item, store)
            lines += _item_lines(paper, item, store, out, findings)
        except RunError:  # what can't be written is not the records' fault
            raise
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if not store.forgiving:
                raise
            at = store.results / "measures"
            problem = f"{paper.name}, {item.title} can't be written ({type(error).__name__}: {error})"
            store.problems[f"{paper.name} {item.name}"] = f"{problem}: remove its records in {at}, and make them again"
            lines += [f"### {paper.name}, {item.title}", "", "Its records can't be read.", ""]
    return "\n".join(lines)


def _item_lines(paper: Paper, item: Item, store: Store, out: Path, findings: Path) -> list[str]:
    lines = [item_text(paper, item, store)]
    if not has_results(item, store):
        return [*lines, f"Not run here: `torchcaps reproduce {paper.name} {item.name} --scale {store.scale}`", ""]
    figure = figure_path(paper, item, store)
    if figure.exists():
        lines += [f"![{item.title}]({os.path.relpath(figure, out.parent)})", ""]
    found = findings / f"{paper.name}-{item.name}.md"
    if found.exists():
        lines += [found.read_text(encoding="utf-8").strip(), ""]
    return [
        *lines,
        f"{_cost(item, store)} Again: `torchcaps reproduce {paper.name} {item.name} --scale {store.scale}`",
        "",
    ]


def _cost(item: Item, store: Store) -> str:
    """Return what an item has taken, by its records: those that it shares with others are counted in each."""
    results = Results(item, store)
    records = [record for source in item.sources() for _, record in results.records(source)]
    seconds = sum(record["found"].get("seconds") or record.get("seconds") or 0.0 for record in records)
    threads = sorted({record["machine"].get("threads", 1) for record in records}) or [1]
    each = f"{threads[0]} thread{'s' * (threads[0] > 1)}" if len(threads) == 1 else "one or more threads"
    return f"{len(records)} record{'s' * (len(records) != 1)}, {seconds / 60:.0f} minutes on {each}."
