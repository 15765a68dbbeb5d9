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
    item_lines,
    item_path,
    render_item,
    table_lines,
    write_item,
)
from torchcaps.reproduce.scales import Scale
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, verdicts
from torchcaps.training.errors import RunError

__all__ = ["FINDINGS_DIRECTORY", "REMARKS_FILE", "choose_verdicts", "render_summary", "write_report"]

FINDINGS_DIRECTORY = "findings"  # next to the records: observations, written by hand, one file per item
REMARKS_FILE = "remarks.md"  # in the same directory: about the records as a whole
REPORT_HEADER = """\
# Reproduced results

Every table and figure of the papers that was run, next to the published numbers, at {scales}.
Written by `{command}` from the records in {directories}; each record has the configuration, seed, learning curve,
duration, machine and command. A number is a mean over seeds with its 95 % confidence interval, which combines that of
the test images and that of the mean over seeds in quadrature. "not run" means that nothing was run; no number is
copied.

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
prediction, nor from a run that diverged: **not judged**. The intervals are not corrected for the number of claims: of
100 true differences of zero about five would be outside.
{precedence}
Except at the scale `full` networks are narrower and trained for a shorter time than in the papers, in the same way for
all rows of a table: absolute numbers are not comparable with the published ones.
"""


def choose_verdicts(item: Item, stores: Sequence[RecordStore]) -> list[tuple[Scale, Verdict]]:
    """Return the verdict on each claim by the first of the scales at which both of its numbers exist, and that scale.

    Args:
        item: the table or figure.
        stores: the records of several scales; those of a later one count only if an earlier one has none.
    """
    judged = [(store.scale, verdicts(Results(item, store))) for store in stores]
    chosen = []
    for index in range(len(item.claims)):
        candidates = [(scale, by_claim[index]) for scale, by_claim in judged]
        ran = [one for one in candidates if one[1].kind is not VerdictKind.NOT_RUN]
        chosen += (ran or candidates)[:1]
    return chosen


def render_summary(papers: Sequence[Paper], stores: Sequence[RecordStore]) -> str:
    """Return the verdicts on all claims as Markdown: counts by paper, reasons, and the claims that are decided."""
    judged: list[tuple[Paper, Item, Scale, Verdict]] = [
        (paper, item, scale, verdict)
        for paper in papers
        for item in paper.items
        for scale, verdict in choose_verdicts(item, _readable(paper, item, stores))
    ]
    published = [entry for entry in judged if entry[3].claim.origin == "paper"]
    lines = ["## Summary", ""]
    lines += ["| | " + " | ".join(VERDICT_TEXT.values()) + " |", "|---" * (1 + len(VERDICT_TEXT)) + "|"]
    for label, kinds in [
        *((paper.name, [verdict.kind for p, *_, verdict in published if p is paper]) for paper in papers),
        ("all claims", [verdict.kind for *_, verdict in published]),
        ("statements of ours", [verdict.kind for *_, verdict in judged if verdict.claim.origin == "ours"]),
    ]:
        lines.append(f"| {label} | " + " | ".join(str(kinds.count(kind)) for kind in VERDICT_TEXT) + " |")
    lines.append("")
    for kind in (VerdictKind.HOLDS, VerdictKind.CONTRADICTED):
        texts = [f"- {p.name}, {item.title}: {describe_verdict(v, s)}" for p, item, s, v in judged if v.kind is kind]
        heading = {VerdictKind.HOLDS: "Claims that hold", VerdictKind.CONTRADICTED: "Contradicted claims"}[kind]
        lines += [f"{heading}:", "", *texts, ""] if texts else [f"{heading}: none.", ""]
    for kind in (VerdictKind.TOO_SHORT, VerdictKind.UNDECIDED, VerdictKind.NOT_JUDGED):
        reasons = Counter(v.reason for *_, v in published if v.kind is kind and v.reason is not None)
        if reasons:
            counts = ", ".join(f"{REASON_TEXT[reason]} ({n})" for reason, n in reasons.most_common())
            lines += [f'Reasons for "{VERDICT_TEXT[kind]}": {counts}.', ""]
    return "\n".join(lines)


def _readable(paper: Paper, item: Item, stores: Sequence[RecordStore]) -> list[RecordStore]:
    """Return the stores whose records of an item are readable."""
    return [store for store in stores if _problem_key(paper, item) not in store.problems]


def _problem_key(paper: Paper, item: Item) -> str:
    """Return the name of an item in the list of problems."""
    return f"{paper.name} {item.name}"


def write_report(
    papers: Sequence[Paper], stores: Sequence[RecordStore], out: Path, command: str, update_items: bool = True
) -> Path:
    """Write the combined Markdown report and return its path.

    Args:
        papers: the papers, in order.
        stores: the records of one or more scales, in order of precedence: a claim is judged at the first of them at
            which it was run.
        out: path of the report.
        command: the command line, printed in the report.
        update_items: also write the table and figure of each item.
    """
    scales = " and ".join(f"the scale `{store.scale}`" for store in stores)
    directories = " and ".join(f"`{store.results}`" for store in stores)
    order = ", then ".join(f"`{store.scale}`" for store in stores)
    precedence = f"\nA claim is judged at the first scale at which it was run: {order}.\n" if len(stores) > 1 else ""
    parts = [REPORT_HEADER.format(scales=scales, command=command, directories=directories, precedence=precedence)]
    parts += [_render_paper(paper, stores, out, update_items) for paper in papers]  # collects unreadable items
    remarks = [store.results / FINDINGS_DIRECTORY / REMARKS_FILE for store in stores]
    summary = [render_summary(papers, stores)]
    summary += [path.read_text(encoding="utf-8").strip() + "\n" for path in remarks if path.exists()]
    write_atomic(out, "\n".join([parts[0], *summary, *parts[1:]]), RunError, sweep=True)
    return out


def _render_paper(paper: Paper, stores: Sequence[RecordStore], out: Path, update_items: bool) -> str:
    """Return all items of a paper as Markdown; report items with unreadable records in ``RecordStore.problems``."""
    lines = [f"## {paper.name}", "", paper.citation, "", f"The paper's claims: {paper.summary}", ""]
    lines += [f"At the scale `cpu`: {paper.cpu_scale}", ""]
    for item in paper.items:
        for store in stores:
            _check_item(paper, item, store, update_items)
        readable = _readable(paper, item, stores)
        lines += _report_lines(paper, item, readable, out) if readable else [f"### {paper.name}, {item.title}", ""]
        for store in stores:
            lines += [] if store in readable else [f"Its records at the scale {store.scale} are not readable.", ""]
    return "\n".join(lines)


def _check_item(paper: Paper, item: Item, store: RecordStore, update: bool) -> None:
    """Write the table and figure of an item, or only render it; collect the problem if its records are unreadable."""
    try:
        if update:
            write_item(paper, item, store)
        else:
            render_item(paper, item, store)
    except RunError:  # a file that can't be written, or a record that must not be skipped
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if not store.skip_unreadable:
            raise
        store.problems[_problem_key(paper, item)] = (
            f"{paper.name}, {item.title} can't be rendered ({type(error).__name__}: {error}): remove its records "
            f"in {store.results / 'measurements'} and run 'torchcaps reproduce {paper.name} {item.name}' again"
        )


def _report_lines(paper: Paper, item: Item, stores: Sequence[RecordStore], out: Path) -> list[str]:
    """Return the part of the report for an item: verdicts, and for each scale table, figure, findings and cost."""
    recorded = [store for store in stores if has_results(item, store)]
    if not recorded:
        last = stores[-1]
        command = f"`torchcaps reproduce {paper.name} {item.name} --scale {last.scale}`"
        return [render_item(paper, item, last), f"Not run: {command}", ""]
    lines = item_lines(paper, item, recorded[0], choose_verdicts(item, recorded))
    lines += _record_lines(paper, item, recorded[0], out)
    for store in recorded[1:]:
        lines += [f"#### {item.title} at the scale {store.scale}", "", *table_lines(item, store, [])]
        lines += _record_lines(paper, item, store, out)
    return lines


def _record_lines(paper: Paper, item: Item, store: RecordStore, out: Path) -> list[str]:
    """Return figure, findings, cost and command of an item at a scale."""
    lines = []
    figure = item_path(paper, item, store, ".png")
    if figure.exists():
        lines += [f"![{item.title}]({os.path.relpath(figure, out.parent)})", ""]
    findings = store.results / FINDINGS_DIRECTORY / f"{paper.name}-{item.name}.md"
    if findings.exists():
        lines += [findings.read_text(encoding="utf-8").strip(), ""]
    command = f"`torchcaps reproduce {paper.name} {item.name} --scale {store.scale}`"
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
