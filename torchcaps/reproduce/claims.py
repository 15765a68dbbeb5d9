"""The table of claims at the start of the report: verdict, numbers, seeds, and the reason in a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchcaps.reproduce.render import VERDICT_TEXT, format_number, format_published, format_two_digits, table_line
from torchcaps.reproduce.scales import Scale
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.statistics import Estimate, Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, VerdictReason

__all__ = ["CLAIM_HEADER", "JudgedClaim", "claim_row", "claim_table"]

CLAIM_HEADER = ("claim", "paper", "verdict", "ours", "published", "seeds", "why")
REASON_SENTENCE = {
    VerdictReason.ONE_SEED: "One seed decides nothing.",
    VerdictReason.NO_INTERVAL: "A single measurement has no interval.",
    VerdictReason.INTERVAL_INCLUDES_ZERO: "The 95 % interval of the difference{difference} includes zero.",
    VerdictReason.HALF_LENGTH_MISSING: (
        "The difference{difference} may change with more training: runs of half the length are missing."
    ),
    VerdictReason.HALF_LENGTH_OTHER_SIGN: "At half the training length the difference has the other sign.",
    VerdictReason.STILL_CHANGING: "From half to full length a number changes by as much as the difference.",
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
    """Return the claims that were run as a Markdown table, ordered by verdict, decided ones first."""
    by_scale = {store.scale: store for store in stores}
    rows = [
        claim_row(one, by_scale[one.scale])
        for kind in VERDICT_TEXT  # holds, contradicted, ...
        for one in judged
        if one.verdict.kind is kind and kind is not VerdictKind.NOT_RUN
    ]
    if not rows:
        return ["No claim has been run yet.", ""]
    return [table_line(CLAIM_HEADER), "|---" * len(CLAIM_HEADER) + "|", *rows, ""]


def claim_row(judged: JudgedClaim, store: RecordStore) -> str:
    """Return the row of a claim."""
    paper, item, verdict = judged.paper, judged.item, judged.verdict
    results = Results(item, store)
    claim = verdict.claim
    numbers, published = [], []
    for row, column in (claim.better, claim.worse):
        cell, unit = item.cell(row, column), item.columns[column]
        estimate = results.estimate(cell)
        numbers.append(_number_text(estimate, unit))
        published.append(format_published(cell, unit) or "none")
    unit = item.columns[claim.better[1]]
    suffix = f" ({unit})" if unit else ""
    cells = (
        ("(ours) " if claim.origin == "ours" else "") + claim.text,
        f"{paper.name}, {item.title}",
        VERDICT_TEXT[verdict.kind],
        f"{numbers[0]} against {numbers[1]}{suffix}",
        "" if set(published) == {"none"} else f"{published[0]} against {published[1]}",
        str(verdict.seeds) if verdict.seeds else "any",
        _sentence(judged),
    )
    return table_line(cells)


def _number_text(estimate: Estimate | None, unit: str) -> str:
    """Return one of the two numbers of a claim, without its interval."""
    if estimate is None or not math.isfinite(estimate.mean):
        return "diverged"
    return f"{estimate.mean:,.0f}" if unit == "parameters" else format_number(estimate.mean, unit)


def _sentence(judged: JudgedClaim) -> str:
    """Return why a claim has its verdict, in a sentence."""
    verdict = judged.verdict
    difference = ""
    if verdict.difference is not None and verdict.half_width:
        difference = f", {format_two_digits(verdict.difference)} ± {format_two_digits(verdict.half_width)},"
    if verdict.reason is not None:
        return REASON_SENTENCE[verdict.reason].format(difference=difference)
    if not difference:
        return "The numbers are exact."
    independent = verdict.claim.convergence_reason
    reason = f", and {independent}" if independent else ""
    return f"The difference{difference} excludes {'the margin' if verdict.claim.margin else 'zero'}{reason}."
