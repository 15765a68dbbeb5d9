"""What the claims that are neither confirmed nor contradicted lack: seeds, half-length runs, or longer training."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from torchcaps.reproduce.claims import JudgedClaim
from torchcaps.reproduce.planner import record_keys
from torchcaps.reproduce.render import REASON_TEXT, count_noun, table_line
from torchcaps.reproduce.schema import Claim, Item, Run
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.reproduce.verdicts import MIN_SEEDS, VerdictKind, VerdictReason

__all__ = ["INCOMPLETE", "missing_records", "open_claim_lines"]

OPEN = (VerdictKind.TOO_SHORT, VerdictKind.UNDECIDED)
INCOMPLETE = (VerdictReason.ONE_SEED, VerdictReason.NO_INTERVAL, VerdictReason.HALF_LENGTH_MISSING)
TEXT = """\
### What would decide the open claims

After a short training the order of two networks says which one learns faster, not which one is better in the end. A
difference that excludes zero is therefore **too short to judge** until runs of half the length, with complete
schedules of their own, have the same order and numbers that are closer to those of the full length than the two
networks are to each other; otherwise only a longer training (the scale `long` or `full`) decides. An interval that
includes zero needs more seeds (`--seeds`), or a longer training if the difference itself is small: no record is
missing. The commands train the missing records of an item, {seeds} seeds and half-length runs; the hours are
estimated from its recorded runs, on one thread of a busy machine.

| item | open claims | missing for a verdict | hours | command |
|---|---|---|---|---|"""


def open_claim_lines(judged: Sequence[JudgedClaim], stores: Sequence[RecordStore]) -> list[str]:
    """Return a section that lists, by item, why claims are open, the missing records, their time and the command."""
    by_scale = {store.scale: store for store in stores}
    groups: dict[tuple[str, str, str], list[JudgedClaim]] = {}
    for one in judged:
        if one.verdict.kind in OPEN:
            groups.setdefault((one.paper.name, one.item.name, one.scale), []).append(one)
    if not groups:
        return []
    lines = TEXT.format(seeds=MIN_SEEDS).splitlines()
    for (paper, item, scale), claims in groups.items():
        reasons = Counter(one.verdict.reason for one in claims if one.verdict.reason is not None)
        why = ", ".join(f"{REASON_TEXT[reason]} ({n})" for reason, n in reasons.most_common())
        incomplete = [one.verdict.claim for one in claims if one.verdict.reason in INCOMPLETE]
        missing = missing_records(claims[0].item, incomplete, by_scale[claims[0].scale])
        known = [seconds for seconds in missing.values() if seconds is not None]
        hours = f"{sum(known) / 3600:.1f}" if known else ""
        command = f"`torchcaps reproduce {paper} {item} --scale {scale}`" if missing else ""
        records = count_noun(len(missing), "record") if missing else "more seeds or longer training"
        lines.append(table_line((f"{paper}, {claims[0].item.title}", why, records, hours, command)))
    return [*lines, ""]


def missing_records(item: Item, claims: Sequence[Claim], store: RecordStore) -> dict[RecordKey, float | None]:
    """Return the records without which claims cannot be decided, with the estimated duration in seconds.

    The duration is the mean of the recorded seeds of the same run, half of it for a half-length run; ``None`` if there
    is none.
    """
    missing: dict[RecordKey, float | None] = {}
    for claim in claims:
        for location in (claim.better, claim.worse):
            source = item.cell(*location).source
            if source is None:
                continue
            for key in record_keys([source], MIN_SEEDS, store.scale):
                for needed in _with_half_length(key, claim):
                    if needed not in missing and store.read(needed) is None:
                        seconds = _mean_seconds(key, store)
                        factor = 0.5 if isinstance(key.source, Run) and needed != key else 1.0
                        missing[needed] = None if seconds is None else factor * seconds
    return missing


def _with_half_length(key: RecordKey, claim: Claim) -> Iterator[RecordKey]:
    """Yield a record and, if the claim depends on the training length, its half-length companion."""
    yield key
    if claim.convergence == "training" and key.source.halved() != key.source:
        yield dataclasses.replace(key, source=key.source.halved())


def _mean_seconds(key: RecordKey, store: RecordStore) -> float | None:
    """Return the mean duration of the recorded seeds of a source."""
    records = [store.read(dataclasses.replace(key, seed=seed)) for seed in store.seeds(key.source)]
    known = [record["results"].get("seconds") or record.get("seconds") for record in records if record is not None]
    durations = [float(seconds) for seconds in known if seconds]
    return statistics.fmean(durations) if durations else None
