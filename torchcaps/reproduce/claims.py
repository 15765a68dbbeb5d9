"""The table of claims at the start of the report: verdict, numbers, seeds, and the reason in a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchcaps.reproduce.render import VERDICT_TEXT, format_number, format_published, format_two_digits, table_line
from torchcaps.reproduce.scales import Scale
from torchcaps.reproduce.schema import Cell, Item, Paper
from torchcaps.reproduce.statistics import Estimate, Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import HalfLength, Verdict, VerdictKind, VerdictReason

__all__ = ["CLAIM_HEADER", "JudgedClaim", "claim_row", "claim_table"]

CLAIM_HEADER = ("claim", "paper", "verdict", "ours", "published", "seeds", "why")
DECIDED = (VerdictKind.HOLDS, VerdictKind.CONTRADICTED)
NOTE_MARK = "†"  # of a published number with a footnote in its table
LISTED_CASES = 2  # more cases of a claim are summarised by the range of their numbers
REASON_SENTENCE = {
    VerdictReason.ONE_SEED: "One seed decides nothing.",
    VerdictReason.NO_INTERVAL: "A single measurement has no interval.",
    VerdictReason.INTERVAL_INCLUDES_ZERO: "{differences} may {limit}.",
    VerdictReason.HALF_LENGTH_MISSING: "{differences} may change with training: no runs of half the length.",
    VerdictReason.HALF_LENGTH_OTHER_SIGN: "{differences} had the other sign at half the training length{half}.",
    VerdictReason.STILL_CHANGING: (
        "{differences} may change with training: from half to full length the two numbers improved{changes}."
    ),
    VerdictReason.NEAR_CHANCE: "A network is nearer to a constant prediction than to the published number.",
    VerdictReason.AT_CHANCE: "A network is not significantly better than a constant prediction.",
    VerdictReason.DIVERGED: "A training run diverged.",
}


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict.

    Args:
        paper, item: the paper and the table or figure that the claim is about.
        scale: scale of the records that it is judged by.
        verdict: the verdict.
    """

    paper: Paper
    item: Item
    scale: Scale
    verdict: Verdict


def claim_table(judged: Sequence[JudgedClaim], stores: Sequence[RecordStore]) -> list[str]:
    """Return the claims that were run as a Markdown table: decided ones first, then by paper in the order of its items.

    Cases of one claim with the same verdict for the same reason share a row.
    """
    by_scale = {store.scale: store for store in stores}
    kinds = list(VERDICT_TEXT)  # holds, contradicted, ...
    ran = [one for one in judged if one.verdict.kind is not VerdictKind.NOT_RUN]
    decided = sorted((one for one in ran if one.verdict.kind in DECIDED), key=lambda one: kinds.index(one.verdict.kind))
    groups: dict[object, list[JudgedClaim]] = {}
    for one in [*decided, *(one for one in ran if one.verdict.kind not in DECIDED)]:
        groups.setdefault(_group_key(one), []).append(one)
    if not groups:
        return ["No claim has been run yet.", ""]
    default = stores[-1].scale
    rows = [claim_row(cases, by_scale[cases[0].scale], default) for cases in groups.values()]
    return [table_line(CLAIM_HEADER), "|---" * len(CLAIM_HEADER) + "|", *rows, ""]


def _group_key(judged: JudgedClaim) -> object:
    """Return what cases of a claim have in common that share a row; a claim without cases is on its own."""
    verdict = judged.verdict
    claim = verdict.claim
    if not claim.case:
        return id(judged)
    location = (judged.paper.name, judged.item.name, judged.scale, judged.item.columns[claim.better[1]])
    return (*location, claim.origin, claim.text, verdict.kind, verdict.reason)


def claim_row(cases: Sequence[JudgedClaim], store: RecordStore, default_scale: Scale | None = None) -> str:
    """Return the row of a claim, or of several cases of it that have the same verdict for the same reason.

    Args:
        cases: the cases of the claim, whose numbers have one unit.
        store: their records.
        default_scale: a scale that is not mentioned.
    """
    paper, item, verdict = cases[0].paper, cases[0].item, cases[0].verdict
    claim = verdict.claim
    unit = item.columns[claim.better[1]]
    results = Results(item, store)
    names = [one.verdict.claim.case for one in cases if one.verdict.claim.case]
    listed = "; ".join(names) if len(names) <= LISTED_CASES else f"{len(names)} cases"
    suffix = f" ({listed})" if names else ""
    scale = "" if cases[0].scale == default_scale else f", scale {cases[0].scale}"
    seeds = sorted({one.verdict.seeds for one in cases})
    cells = (
        ("(ours) " if claim.origin == "ours" else "") + claim.text + suffix,
        f"{paper.name}, {item.title}{scale}",
        VERDICT_TEXT[verdict.kind],
        f"{_our_numbers(cases, results, unit)} ({_describe_numbers(cases, unit)})",
        _published_numbers(cases, unit),
        (f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}") if seeds[0] else "any",
        _sentence([one.verdict for one in cases], unit),
    )
    return table_line(cells)


def _describe_numbers(cases: Sequence[JudgedClaim], unit: str) -> str:
    """Return what the numbers are: the column (or row) that all of them share, and their unit."""
    locations = [location for one in cases for location in (one.verdict.claim.better, one.verdict.claim.worse)]
    shared = [names.pop() for names in map(set, zip(*locations, strict=True)) if len(names) == 1]
    return ", ".join([*shared, unit] if unit else shared)


def _our_numbers(cases: Sequence[JudgedClaim], results: Results, unit: str) -> str:
    """Return the two numbers of a claim with the names of their rows, or those of its cases, without intervals."""
    pairs = []
    for one in cases:
        claim = one.verdict.claim
        pairs.append([results.estimate(one.item.cell(*location)) for location in (claim.better, claim.worse)])
    if len(cases) == 1:
        claim = cases[0].verdict.claim
        labels = (claim.better[0], claim.worse[0]) if claim.better[0] != claim.worse[0] else None
        better, worse = labels or (claim.better[1], claim.worse[1])
        return f"{better}: {_number_text(pairs[0][0], unit)}; {worse}: {_number_text(pairs[0][1], unit)}"
    if len(cases) <= LISTED_CASES:
        return "; ".join(" against ".join(_number_text(estimate, unit) for estimate in pair) for pair in pairs)
    sides = zip(*pairs, strict=True)
    return " against ".join(_range_text([e.mean if e else math.nan for e in side], unit) for side in sides)


def _published_numbers(cases: Sequence[JudgedClaim], unit: str) -> str:
    """Return the published numbers of the cases of a claim; empty if the paper prints none of them."""
    cells = []
    for one in cases:
        claim = one.verdict.claim
        cells.append([one.item.cell(*location) for location in (claim.better, claim.worse)])
    if all(cell.printed is None for pair in cells for cell in pair):
        return ""
    if len(cases) <= LISTED_CASES:
        return "; ".join(" against ".join(_published_number(cell, unit) for cell in pair) for pair in cells)
    sides = [[cell.printed.value for cell in side if cell.printed] for side in zip(*cells, strict=True)]
    return " against ".join(f"{min(side):g} to {max(side):g}" if side else "none" for side in sides)


def _published_number(cell: Cell, unit: str) -> str:
    """Return a published number, with a mark if there is a note on it."""
    mark = NOTE_MARK if cell.printed is not None and cell.printed.note else ""
    return (format_published(cell, unit) or "none") + mark


def _range_text(numbers: Sequence[float], unit: str) -> str:
    return f"{format_number(min(numbers), unit)} to {format_number(max(numbers), unit)}"


def _number_text(estimate: Estimate | None, unit: str) -> str:
    """Format one of the two numbers of a claim without its interval; "diverged" if it is missing or not finite."""
    if estimate is None or not math.isfinite(estimate.mean):
        return "diverged"
    return f"{estimate.mean:,.0f}" if unit == "parameters" else format_number(estimate.mean, unit)


def _sentence(verdicts: Sequence[Verdict], unit: str) -> str:
    """Return why a claim, or each of its cases, has its verdict, in a sentence."""
    verdict = verdicts[0]
    claim = verdict.claim
    differences = _differences(verdicts, " points" if "%" in unit else "")
    if verdict.reason is not None:
        if claim.margin and verdict.reason is not VerdictReason.INTERVAL_INCLUDES_ZERO:
            differences = f"{differences[:-1]} (margin {format_two_digits(-claim.margin)}),"
        half: HalfLength | None = verdict.half if len(verdicts) == 1 else None
        limit = f"be on either side of the margin, {format_two_digits(-claim.margin)}" if claim.margin else "be zero"
        texts = {"differences": differences, "limit": limit, "half": "", "changes": ""}
        if half is not None:
            changes = [format_two_digits(change) for change in (half.better_change, half.worse_change)]
            texts |= {"half": f" ({format_two_digits(half.difference)})", "changes": f" by {' and '.join(changes)}"}
        return REASON_SENTENCE[verdict.reason].format(**texts)
    if not any(one.half_width for one in verdicts):
        return "The numbers are exact."
    reason = f", and {claim.convergence_reason}" if claim.convergence_reason else ""
    limit = f"the margin, {format_two_digits(-claim.margin)}" if claim.margin else "zero"
    verb = "excludes" if len(verdicts) == 1 else "exclude"
    return f"{differences} {verb} {limit}{reason}."


def _differences(verdicts: Sequence[Verdict], unit: str) -> str:
    """Return the subject of the sentence: the difference with its interval, or those of several cases."""
    known = [(one.difference, one.half_width) for one in verdicts if one.difference is not None]
    if len(verdicts) > LISTED_CASES:
        low, high = (format_two_digits(extreme(d for d, _ in known)) for extreme in (min, max))
        return f"Each of the {len(verdicts)} differences, {low} to {high}{unit},"
    texts = [
        format_two_digits(difference) + (f" ± {format_two_digits(half_width)}" if half_width else "")
        for difference, half_width in known
    ]
    noun = "The difference," if len(verdicts) == 1 else "The differences,"
    return f"{noun} {' and '.join(texts)}{unit},"
