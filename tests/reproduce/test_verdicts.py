"""Verdicts: each rule with a case that fails it, on synthetic records."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.items import smoke_store
from tests.reproduce.tables import A_IS_BETTER, cpu_store, make_runs, run_table, write_errors
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, ParameterCount, Run, TableRow
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordKey
from torchcaps.reproduce.verdicts import Verdict, VerdictKind, VerdictReason, chance_accuracy, judge, verdicts

Outcome = tuple[VerdictKind, VerdictReason | None]
HOLDS: Outcome = (VerdictKind.HOLDS, None)
CONTRADICTED: Outcome = (VerdictKind.CONTRADICTED, None)


def verdict_of_runs(
    directory: Path,
    a: tuple[int, ...],
    b: tuple[int, ...],
    half_a: tuple[int, ...] = (),
    half_b: tuple[int, ...] = (),
    claim: Claim = A_IS_BETTER,
) -> Verdict:
    """Return the verdict on two runs with these numbers of errors per seed, of 10,000 test images."""
    store, runs = smoke_store(directory), make_runs("ab")
    for name, errors, half in (("a", a, half_a), ("b", b, half_b)):
        write_errors(store, runs[name], errors)
        write_errors(store, runs[name].halved(), half)
    (verdict,) = verdicts(run_table(store, runs, claim=claim))
    return verdict


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        (((100, 110), (300, 310), (150, 160), (350, 360)), HOLDS),
        (((300, 310), (100, 110), (350, 360), (150, 160)), CONTRADICTED),
        (((100, 110), (300, 310), (150,), (350,)), HOLDS),  # one seed of half length is sufficient
        # a: two seeds or more on both sides
        (((100,), (300, 310), (150,), (350, 360)), (VerdictKind.UNDECIDED, VerdictReason.ONE_SEED)),
        (((100, 110), (300,), (150, 160), (350,)), (VerdictKind.UNDECIDED, VerdictReason.ONE_SEED)),
        # b: an interval that excludes zero
        (
            ((100, 200), (250, 350), (100, 200), (250, 350)),
            (VerdictKind.UNDECIDED, VerdictReason.INTERVAL_INCLUDES_ZERO),
        ),
        # c: half-length runs of both, the same sign, and changes smaller than the difference
        (((100, 110), (300, 310)), (VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_MISSING)),
        (((100, 110), (300, 310), (150, 160)), (VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_MISSING)),
        (((100, 110), (300, 310), (), (350, 360)), (VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_MISSING)),
        (
            ((100, 110), (300, 310), (250, 260), (240, 250)),
            (VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_OTHER_SIGN),
        ),
        (((100, 110), (300, 310), (320, 330), (500, 510)), (VerdictKind.TOO_SHORT, VerdictReason.STILL_CHANGING)),
        (((100, 110), (300, 310), (100, 110), (500, 510)), (VerdictKind.TOO_SHORT, VerdictReason.STILL_CHANGING)),
        (((200, 210), (300, 310), (50, 60), (150, 160)), (VerdictKind.TOO_SHORT, VerdictReason.STILL_CHANGING)),
        (((100,), ()), (VerdictKind.NOT_RUN, None)),
        (((), (100,)), (VerdictKind.NOT_RUN, None)),
    ],
)
def test_rules_for_two_runs(tmp_path: Path, errors: tuple[tuple[int, ...], ...], outcome: Outcome) -> None:
    verdict = verdict_of_runs(tmp_path, *errors)
    assert (verdict.kind, verdict.reason) == outcome


def test_the_verdict_states_difference_seeds_and_the_comparison_at_half_length(tmp_path: Path) -> None:
    verdict = verdict_of_runs(tmp_path, (100, 110), (300, 310, 320), (150, 160), (340,))
    assert verdict.difference == pytest.approx(2.05)
    assert verdict.half_width > 0
    assert verdict.seeds == 2
    half = verdict.half
    assert half is not None
    assert dataclasses.astuple(half) == pytest.approx((1.85, 0.5, 0.3, 1))


def test_accuracies_are_better_if_higher(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    for name, errors in (("a", (100, 110)), ("b", (300, 310))):
        write_errors(store, runs[name], errors)
        write_errors(store, runs[name].halved(), tuple(n + 50 for n in errors))
    rows = tuple(TableRow(name, {"x": Cell(None, run, "accuracy")}) for name, run in runs.items())
    results = Results(Item("t", "Table", "A table.", {"x": "%"}, rows), store)
    for better, worse, outcome in (("a", "b", HOLDS), ("b", "a", CONTRADICTED)):
        verdict = judge(results, Claim("it is better", (better, "x"), (worse, "x"), lower_is_better=False))
        assert (verdict.kind, verdict.reason) == outcome
        assert verdict.half is not None
        assert (verdict.half.better_change, verdict.half.worse_change) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("errors", "margin", "outcome"),
    [
        (((120, 120), (100, 100), (122, 122), (102, 102)), 0.5, HOLDS),  # 0.2 points worse
        (((220, 220), (100, 100), (222, 222), (102, 102)), 0.5, CONTRADICTED),
        (((120, 120), (100, 100), (180, 180), (102, 102)), 0.5, (VerdictKind.TOO_SHORT, "HALF_LENGTH_OTHER_SIGN")),
        (((148, 148), (100, 100), (148, 148), (100, 100)), 0.5, (VerdictKind.UNDECIDED, "INTERVAL_INCLUDES_ZERO")),
    ],
)
def test_a_margin_permits_a_small_disadvantage(
    tmp_path: Path, errors: tuple[tuple[int, ...], ...], margin: float, outcome: tuple[VerdictKind, str | None]
) -> None:
    claim = dataclasses.replace(A_IS_BETTER, margin=margin)
    verdict = verdict_of_runs(tmp_path, *errors, claim=claim)
    assert (verdict.kind, verdict.reason and verdict.reason.name) == outcome


def test_nothing_is_concluded_from_a_diverged_run(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    write_errors(store, runs["a"], (100, 110))
    write_errors(store, runs["b"], (300, 310))
    store.write_diverged(RecordKey(runs["b"], 2), run_spec(runs["b"], "smoke"), "step 3")
    results = run_table(store, runs)
    for claim in (A_IS_BETTER, Claim("b is better", ("b", "error"), ("a", "error"))):
        verdict = judge(results, claim)
        assert (verdict.kind, verdict.reason) == (VerdictKind.NOT_JUDGED, VerdictReason.DIVERGED)


@pytest.mark.parametrize("n_errors", [10_000, 9_000, 8_950], ids=["none correct", "10 %", "10.5 %"])
def test_nothing_is_concluded_from_a_network_at_chance(tmp_path: Path, n_errors: int) -> None:
    """Ten classes: 10.5 % of 10,000 images are not significantly more than 10 %; one such seed is sufficient."""
    errors = (100, 110), (300, n_errors), (150, 160), (350, 360)
    verdict = verdict_of_runs(tmp_path, *errors)
    assert (verdict.kind, verdict.reason) == (VerdictKind.NOT_JUDGED, VerdictReason.AT_CHANCE)


def test_a_network_above_chance_is_judged(tmp_path: Path) -> None:
    verdict = verdict_of_runs(tmp_path, (100, 110), (8_900, 8_910), (150, 160), (8_950, 8_960))
    assert (verdict.kind, verdict.reason) == HOLDS  # 11 %


@pytest.mark.parametrize(
    ("published", "outcome"),
    [
        (24.0, HOLDS),  # halfway between 24 and 90 % is 57 %
        (23.0, (VerdictKind.TOO_SHORT, VerdictReason.NEAR_CHANCE)),
        (None, HOLDS),
    ],
)
def test_networks_at_the_start_of_their_training_are_not_compared(
    published: float | None, outcome: Outcome, tmp_path: Path
) -> None:
    """Both lengths are alike, but the worse network has an error of 56.6 %, near the 90 % of constant predictions."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    for name, errors, half in (("a", (3_000, 3_010), (3_100, 3_110)), ("b", (5_650, 5_660), (5_700, 5_710))):
        write_errors(store, runs[name], errors)
        write_errors(store, runs[name].halved(), half)
    rows = tuple(TableRow(name, {"error": Cell(published, run)}) for name, run in runs.items())
    item = Item("t", "Table", "A table.", {"error": "test error, %"}, rows, (A_IS_BETTER,))
    verdict = judge(Results(item, store), A_IS_BETTER)
    assert (verdict.kind, verdict.reason) == outcome


def test_chance_is_the_fraction_of_the_largest_class() -> None:
    config: dict[str, Any] = {"data": "mnist", "data_options": {}, "test_data": "", "test_options": {}}
    results = {"n": 100, "class_counts": [40] + 6 * [10]}
    assert chance_accuracy({"config": config, "results": results}) == 0.4
    assert chance_accuracy({"config": config, "results": {"n": 100}}) == 0.1
    pairs = {**config, "data": "multimnist", "data_options": {"max_shift": 2}}
    several = {"n": 100, "class_counts": 10 * [20]}
    assert chance_accuracy({"config": pairs, "results": several}) == pytest.approx(1 / 45)
    other = {**config, "test_data": "cifar100"}
    assert chance_accuracy({"config": other, "results": {"n": 100}}) == 0.01


def test_a_run_record_has_the_class_counts(tmp_path: Path) -> None:
    store, run = smoke_store(tmp_path), Run("capsnet_small")
    write_errors(store, run, (0,))
    directory = store.run_directory(RecordKey(run, 0))
    report = json.loads(directory.results.read_text())
    report["test"]["last"]["class_counts"] = [6_000, 4_000]
    directory.results.write_text(json.dumps(report))
    store.write_run(RecordKey(run, 0))
    record = store.read(RecordKey(run, 0))
    assert record is not None
    assert chance_accuracy(record) == 0.6


def measured(
    directory: Path, numbers: dict[str, tuple[float, ...]], claim: Claim, images: int = 10_000, **options: Any
) -> Verdict:
    """Return the verdict on two measurements with these numbers per seed; ``a-half`` are those at half length."""
    store, runs = cpu_store(directory), make_runs("ab")
    measurements = {name: Measurement(name, dict, {"net": runs[name]}, **options) for name in "ab"}
    for name, values in numbers.items():
        measurement = measurements[name[0]]
        for seed, value in enumerate(values):
            key = RecordKey(measurement if name in measurements else measurement.halved(), seed)
            store.write_measurement(key, {"error": value, "error_images": images}, 1.0)
    rows = tuple(TableRow(name, {"error": Cell(None, m, "error")}) for name, m in measurements.items())
    return judge(Results(Item("t", "Table", "A table.", {"error": "test error, %"}, rows, (claim,)), store), claim)


FULL = {"a": (1.0, 1.1), "b": (5.0, 5.1)}


@pytest.mark.parametrize(
    ("half", "outcome"),
    [
        ({}, (VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_MISSING)),
        ({"a-half": (1.5,), "b-half": (5.5,)}, HOLDS),
        ({"a-half": (6.5,), "b-half": (9.5,)}, (VerdictKind.TOO_SHORT, VerdictReason.STILL_CHANGING)),
    ],
)
def test_measurements_on_trained_networks_are_repeated_at_half_length(
    tmp_path: Path, half: dict[str, tuple[float, ...]], outcome: Outcome
) -> None:
    verdict = measured(tmp_path, {**FULL, **half}, A_IS_BETTER)
    assert (verdict.kind, verdict.reason) == outcome


def test_a_measurement_on_a_network_at_chance_is_not_judged(tmp_path: Path) -> None:
    write_errors(cpu_store(tmp_path), make_runs("ab")["b"], (9_000,))
    verdict = measured(tmp_path, {**FULL, "a-half": (1.5,), "b-half": (5.5,)}, A_IS_BETTER)
    assert (verdict.kind, verdict.reason) == (VerdictKind.NOT_JUDGED, VerdictReason.AT_CHANCE)


def test_a_number_without_training_is_the_same_at_half_length(tmp_path: Path) -> None:
    """A reference that needs no network is compared with a network's number."""
    store, (run,) = cpu_store(tmp_path), make_runs("a").values()
    net, reference = Measurement("net", dict, {"net": run}), Measurement("reference", dict)
    for measurement, numbers in ((net, (0.9, 0.91)), (net.halved(), (0.85,)), (reference, (0.46, 0.47))):
        for seed, number in enumerate(numbers):
            store.write_measurement(RecordKey(measurement, seed), {"x": number}, 1.0)
    rows = tuple(TableRow(m.name, {"x": Cell(None, m, "x")}) for m in (net, reference))
    results = Results(Item("t", "Table", "A table.", {"x": "ratio"}, rows), store)
    verdict = judge(results, Claim("it is higher", ("net", "x"), ("reference", "x"), lower_is_better=False))
    assert (verdict.kind, verdict.reason) == HOLDS
    assert verdict.half is not None
    assert (verdict.half.worse_change, verdict.half.seeds) == (0.0, 1)


UNTRAINED: dict[str, Any] = {"convergence": "not applicable", "convergence_reason": "nothing is trained"}


def test_a_claim_without_training_needs_no_half_length_runs(tmp_path: Path) -> None:
    verdict = measured(tmp_path, FULL, dataclasses.replace(A_IS_BETTER, **UNTRAINED))
    assert (verdict.kind, verdict.reason, verdict.half) == (*HOLDS, None)


@pytest.mark.parametrize(
    ("images", "outcome"), [(0, (VerdictKind.UNDECIDED, VerdictReason.NO_INTERVAL)), (10_000, HOLDS)]
)
def test_a_measurement_that_depends_on_no_seed_needs_an_interval(tmp_path: Path, images: int, outcome: Outcome) -> None:
    claim = dataclasses.replace(A_IS_BETTER, **UNTRAINED)
    verdict = measured(tmp_path, {"a": (1.0,), "b": (5.0,)}, claim, images, seed_independent=True)
    assert (verdict.kind, verdict.reason, verdict.seeds) == (*outcome, 0)


def test_parameter_counts_are_exact(tmp_path: Path) -> None:
    counts = {name: ParameterCount(Run("capsnet_small", {"width": w})) for name, w in (("narrow", 8), ("wide", 16))}
    rows = tuple(TableRow(name, {"n": Cell(None, count)}) for name, count in counts.items())
    results = Results(Item("t", "Table", "A table.", {"n": "parameters"}, rows), cpu_store(tmp_path))
    for better, worse, outcome in (
        ("narrow", "wide", HOLDS),
        ("wide", "narrow", CONTRADICTED),
        ("wide", "wide", (VerdictKind.UNDECIDED, VerdictReason.INTERVAL_INCLUDES_ZERO)),
    ):
        verdict = judge(results, Claim("it is smaller", (better, "n"), (worse, "n"), **UNTRAINED))
        assert (verdict.kind, verdict.reason) == outcome


@pytest.mark.parametrize(
    "fields",
    [
        {"convergence": "none"},
        {"convergence": "not applicable"},
        {"convergence_reason": "it converges"},
        {"margin": -1.0},
    ],
)
def test_an_inconsistent_claim_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Claim: ") as raised:
        dataclasses.replace(A_IS_BETTER, **fields)
    assert next(iter(fields)) in str(raised.value)
