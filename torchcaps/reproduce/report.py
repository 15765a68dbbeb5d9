"""The combined report: summary of all verdicts, then every table and figure of every paper."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchcaps._core.files import write_atomic
from torchcaps.reproduce.render import (
    REASON_TEXT,
    VERDICT_TEXT,
    count_noun,
    describe_verdict,
    has_results,
    item_path,
    render_item,
    write_item,
)
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, verdicts
from torchcaps.training.errors import RunError

__all__ = ["FINDINGS_DIRECTORY", "REMARKS_FILE", "render_summary", "write_report"]

FINDINGS_DIRECTORY = "findings"  # next to the records: observations, written by hand, one file per item
REMARKS_FILE = "remarks.md"  # in the same directory: about the records as a whole
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

Except at the scale `full` networks are narrower and trained for a shorter time than in the papers, in the same way for
all rows of a table: absolute numbers are not comparable with the published ones.
"""


def render_summary(papers: Sequence[Paper], store: RecordStore) -> str:
    """Return the verdicts on all claims as Markdown: counts by paper, reasons, and the claims that are decided."""
    judged = [(paper, item, verdict) for paper in papers for item, verdict in _verdicts_of(paper, store)]
    lines = ["## Summary", ""]
    lines += ["| | " + " | ".join(VERDICT_TEXT.values()) + " |", "|---" * (1 + len(VERDICT_TEXT)) + "|"]
    for label, kinds in [
        *((paper.name, [verdict.kind for p, _, verdict in judged if p is paper]) for paper in papers),
        ("all claims", [verdict.kind for *_, verdict in judged]),
    ]:
        lines.append(f"| {label} | " + " | ".join(str(kinds.count(kind)) for kind in VERDICT_TEXT) + " |")
    lines.append("")
    for kind in (VerdictKind.HOLDS, VerdictKind.CONTRADICTED):
        texts = [f"- {p.name}, {item.title}: {describe_verdict(v)}" for p, item, v in judged if v.kind is kind]
        heading = {VerdictKind.HOLDS: "Claims that hold", VerdictKind.CONTRADICTED: "Contradicted claims"}[kind]
        lines += [f"{heading}:", "", *texts, ""] if texts else [f"{heading}: none.", ""]
    for kind in (VerdictKind.TOO_SHORT, VerdictKind.UNDECIDED, VerdictKind.NOT_JUDGED):
        reasons = Counter(v.reason for *_, v in judged if v.kind is kind and v.reason is not None)
        if reasons:
            counts = ", ".join(f"{REASON_TEXT[reason]} ({n})" for reason, n in reasons.most_common())
            lines += [f'Reasons for "{VERDICT_TEXT[kind]}": {counts}.', ""]
    return "\n".join(lines)


def _verdicts_of(paper: Paper, store: RecordStore) -> list[tuple[Item, Verdict]]:
    """Return the verdicts on the claims of a paper, except those of items whose records are not readable."""
    items = [item for item in paper.items if _problem_key(paper, item) not in store.problems]
    return [(item, verdict) for item in items for verdict in verdicts(Results(item, store))]


def _problem_key(paper: Paper, item: Item) -> str:
    return f"{paper.name} {item.name}"


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
    parts = [REPORT_HEADER.format(scale=store.scale, command=command, results=store.results)]
    parts += [_render_paper(paper, store, out, update_items) for paper in papers]  # collects unreadable items
    parts.insert(1, render_summary(papers, store))
    remarks = store.results / FINDINGS_DIRECTORY / REMARKS_FILE
    if remarks.exists():
        parts.insert(2, remarks.read_text(encoding="utf-8").strip() + "\n")
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
            store.problems[_problem_key(paper, item)] = (
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
    return f"{count_noun(len(records), 'record')}, {seconds / 60:.0f} minutes on {cores}."
