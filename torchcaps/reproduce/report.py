"""The combined report: the claims with their verdicts, every table and figure of every paper, method, appendix."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchcaps._core.files import write_atomic
from torchcaps.reproduce.claims import JudgedClaim, claim_table
from torchcaps.reproduce.open_claims import INCOMPLETE, open_claim_lines
from torchcaps.reproduce.render import (
    REASON_TEXT,
    VERDICT_TEXT,
    count_noun,
    count_numbers,
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

__all__ = [
    "FINDINGS_DIRECTORY",
    "PROVENANCE_FILE",
    "REMARKS_FILE",
    "choose_verdicts",
    "judge_claims",
    "render_claims",
    "write_report",
]

FINDINGS_DIRECTORY = "findings"  # next to the records: observations, written by hand, one file per item
REMARKS_FILE = "remarks.md"  # in the same directory: about the records as a whole
PROVENANCE_FILE = "provenance.md"  # in the same directory: changed settings, machines, added seeds
REPORT_HEADER = """\
# Reproduced results

Each claim of the papers that was run, with its verdict by our numbers: decided claims first, the others by paper. A
row has the two numbers that a claim compares, the one that is said to be better first, and their difference, positive
if the claim is right about our networks; several cases of a claim with the same verdict share a row. "(ours)" marks
statements that the paper does not make, "†" published numbers with a footnote in the table of their item. Networks
are narrower and trained for a shorter time than in the papers, in the same way for all rows of a table: absolute
numbers are not comparable with the published ones. Below: tables and figures of each paper, the [method](#method)
with the rules of a verdict, and an [appendix](#appendix) with what is missing for the open claims and the history of
settings.
"""
METHOD = """\
## Method

Every table and figure of the papers that was run is next to the published numbers, at {scales}.
This page is written by `{command}` from the records in {directories}; each record has the configuration,
seed, learning curve, duration, machine and command. A number is a mean over seeds with its 95 % confidence interval,
which combines that of the test images and that of the mean over seeds in quadrature. "not run" means that nothing was
run; no number is copied.

A claim of a paper **holds** or is **contradicted** only if all of the following is true:

- Both numbers are means over two seeds or more. Measurements that do not depend on a seed are exempt.
- The 95 % interval of their difference excludes zero. Runs that were tested on the same images are compared image by
  image. The variance between seeds is estimated from the rows of a column that have several seeds.
- Training has converged: runs of half the length, each with a complete schedule of its own, give a difference of the
  same sign, and from half to full length neither number changes by as much as the difference. Measurements on trained
  networks are repeated on the half-length networks. Networks whose accuracy is nearer to that of a constant prediction
  than to the published one are not compared: at the start of a training two lengths can differ little because neither
  has learned much. Costs, parameter counts and the like are exempt; the reason is stated.

It is **undecided** if one of the first two is false, and **too short to judge** if only the third is, or if half-length
runs are missing. Nothing is concluded from a network whose accuracy is not significantly above that of a constant
prediction, nor from a run that diverged: **not judged**. The intervals are not corrected for the number of claims: of
100 true differences of zero about five would be outside.
{precedence}"""


def choose_verdicts(item: Item, stores: Sequence[RecordStore]) -> list[tuple[Scale, Verdict]]:
    """Return the verdict on each claim by the first of the scales at which it was run completely, and that scale.

    Complete means that both numbers have the seeds and half-length runs that a decision needs: the first record of a
    longer scale does not replace a verdict by the complete records of a shorter one, nor does a run of it that diverged
    or is at chance level. If no scale is complete, the first one at which both numbers exist and can be judged counts.

    Args:
        item: the table or figure.
        stores: the records of several scales, in order of precedence.
    """
    judged = [(store.scale, verdicts(Results(item, store))) for store in stores]
    chosen = []
    for index in range(len(item.claims)):
        candidates = [(scale, by_claim[index]) for scale, by_claim in judged]
        ran = [one for one in candidates if one[1].kind is not VerdictKind.NOT_RUN]
        judged_here = [one for one in ran if one[1].kind is not VerdictKind.NOT_JUDGED]
        complete = [one for one in judged_here if one[1].reason not in INCOMPLETE]
        chosen += (complete or judged_here or ran or candidates)[:1]
    return chosen


def judge_claims(papers: Sequence[Paper], stores: Sequence[RecordStore]) -> list[JudgedClaim]:
    """Return the verdicts on the claims of all items, each at the scale that `choose_verdicts` takes."""
    return [
        JudgedClaim(paper, item, scale, verdict)
        for paper in papers
        for item in paper.items
        for scale, verdict in choose_verdicts(item, _readable(paper, item, stores))
    ]


def render_claims(papers: Sequence[Paper], stores: Sequence[RecordStore]) -> str:
    """Return the verdicts on all claims as Markdown: the table of claims, then the counts by paper and the reasons."""
    judged = judge_claims(papers, stores)
    published = [one for one in judged if one.verdict.claim.origin == "paper"]
    lines = ["## Claims", "", *claim_table(judged, stores), "### Counts", ""]
    lines += ["| | " + " | ".join(VERDICT_TEXT.values()) + " |", "|---" * (1 + len(VERDICT_TEXT)) + "|"]
    for label, kinds in [
        *((paper.name, [one.verdict.kind for one in published if one.paper is paper]) for paper in papers),
        ("all claims", [one.verdict.kind for one in published]),
        ("statements of ours", [one.verdict.kind for one in judged if one.verdict.claim.origin == "ours"]),
    ]:
        lines.append(f"| {label} | " + " | ".join(str(kinds.count(kind)) for kind in VERDICT_TEXT) + " |")
    lines += ["", "A claim with several cases, such as sizes of a perturbation, counts once per case.", ""]
    for kind in (VerdictKind.TOO_SHORT, VerdictKind.UNDECIDED, VerdictKind.NOT_JUDGED):
        verdicts_of_kind = [one.verdict for one in published if one.verdict.kind is kind]
        reasons = Counter(verdict.reason for verdict in verdicts_of_kind if verdict.reason is not None)
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
        stores: the records of one or more scales, in order of precedence; see `choose_verdicts`.
        out: path of the report.
        command: the command line, printed in the report.
        update_items: also write the table and figure of each item.
    """
    scales = " and ".join(f"the scale `{store.scale}`" for store in stores)
    directories = " and ".join(f"`{store.results}`" for store in stores)
    order = ", then ".join(f"`{store.scale}`" for store in stores)
    precedence = (
        f"\nA claim is judged at the first scale that has all seeds and half-length runs for it: {order}. The most\n"
        "complete scale of a table comes first; the other one follows with the rows that were run.\n"
        if len(stores) > 1
        else ""
    )
    sections = [_render_paper(paper, stores, out, update_items) for paper in papers]  # collects unreadable items
    method = METHOD.format(scales=scales, command=command, directories=directories, precedence=precedence)
    appendix = [*open_claim_lines(judge_claims(papers, stores), stores), *_read_remarks(stores, PROVENANCE_FILE)]
    page = [REPORT_HEADER, render_claims(papers, stores), *_read_remarks(stores, REMARKS_FILE), *sections, method]
    page += ["## Appendix\n", *appendix] if appendix else []
    write_atomic(out, "\n".join(page), RunError, sweep=True)
    return out


def _read_remarks(stores: Sequence[RecordStore], name: str) -> list[str]:
    """Return the texts of a file next to the findings, one for each scale that has it."""
    paths = [store.results / FINDINGS_DIRECTORY / name for store in stores]
    return [path.read_text(encoding="utf-8").strip() + "\n" for path in paths if path.exists()]


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
    """Return the part of the report for an item: verdicts, and for each scale table, figure, findings and cost.

    The scale with the most numbers comes first. Of the others only the rows that were run are shown.
    """
    recorded = [store for store in stores if has_results(item, store)]
    if not recorded:
        last = stores[-1]
        command = f"`torchcaps reproduce {paper.name} {item.name} --scale {last.scale}`"
        return [render_item(paper, item, last), f"Not run: {command}", ""]
    first, *others = sorted(recorded, key=lambda store: -count_numbers(item, store))  # stable: precedence breaks ties
    lines = item_lines(paper, item, first, choose_verdicts(item, recorded))
    lines += _record_lines(paper, item, first, out)
    for store in others:
        lines += [f"#### {item.title} at the scale {store.scale}", "", *table_lines(item, store, [], only_run=True)]
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
