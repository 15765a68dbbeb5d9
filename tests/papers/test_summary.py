"""Numbers from records, with known answers: intervals, verdicts, tables."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.alignment import Alignment
from torchcaps.metrics import wilson_interval
from torchcaps.reproduce.markdown import item_text, ours, published
from torchcaps.reproduce.render import write_report
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Cell, Claim, Item, Measure, Paper, Parameters, Published, Row, Run
from torchcaps.reproduce.statistics import Results, Value
from torchcaps.reproduce.store import Job, Store
from torchcaps.routing import Dynamic
from torchcaps.training import RunError


def nothing(context: Any) -> dict[str, Any]:
    return {}


def measured(name: str) -> Measure:
    return Measure(name, nothing)


def item_of(**claim: Any) -> Item:
    rows = tuple(Row(name, {"error": Cell(Published(1.0, 0.1), measured(name), "error")}) for name in ("a", "b"))
    claims = (Claim("a is better", ("a", "error"), ("b", "error"), **claim),)
    return Item("t", "Table", "A table.", {"error": "test error, %"}, rows, claims)


def filled(tmp_path: Path, a: list[float], b: list[float], images: int = 10_000) -> Results:
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    item = item_of()
    for name, numbers in (("a", a), ("b", b)):
        for seed, number in enumerate(numbers):
            store.write_measure(Job(measured(name), seed), {"error": number, "error_images": images}, 1.0)
    return Results(item, store)


def test_one_seed_has_the_interval_of_its_test_images(tmp_path: Path) -> None:
    value = filled(tmp_path, [2.0], []).value(item_of().rows[0].cells["error"])
    low, high = wilson_interval(200, 10_000)
    assert value is not None
    assert (value.mean, value.seeds, value.spread) == (2.0, 1, None)
    assert (value.low, value.high) == pytest.approx((100 * low, 100 * high))


def test_seeds_widen_the_interval_in_squares(tmp_path: Path) -> None:
    value = filled(tmp_path, [1.8, 2.2], []).value(item_of().rows[0].cells["error"])
    assert value is not None
    _, high = wilson_interval(200, 10_000)
    spread = math.sqrt(0.08)
    assert value.spread == pytest.approx(spread)
    assert value.high - value.mean == pytest.approx(math.hypot(100 * high - 2, 12.706 * spread / math.sqrt(2)))


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [([1.0], [3.0], "holds"), ([3.0], [1.0], "contradicted"), ([1.9], [2.0], "undecided"), ([1.0], [], "not run")],
)
def test_a_claim_holds_where_the_interval_of_the_difference_excludes_zero(
    tmp_path: Path, a: list[float], b: list[float], word: str
) -> None:
    (verdict,) = filled(tmp_path, a, b).verdicts()
    assert verdict.word == word
    assert str(verdict).startswith(f"{word} with one seed: a is better" if b else f"{word}: a is better")


def test_more_may_be_better(tmp_path: Path) -> None:
    results = filled(tmp_path, [3.0], [1.0])
    claim = Claim("a is better", ("a", "error"), ("b", "error"), lower=False)
    assert results.verdict(claim).word == "holds"


def test_tables_have_both_columns_and_say_what_did_not_run(tmp_path: Path) -> None:
    results = filled(tmp_path, [2.1, 2.1], [])
    paper = Paper("p", "P.", "c", "c", "s", ("d",), (results.item,))
    text = item_text(paper, results.item, results.store)
    assert "| a | 1 ± 0.1 | 2.10 (1.84 to 2.40), 2 seeds |" in text
    assert "| b | 1 ± 0.1 | not run |" in text
    assert "Scale: cpu." in text


def test_notes_stand_below_the_table(tmp_path: Path) -> None:
    row = Row("a", {"error": Cell(Published(5.0, note="it can't be"), None)})
    item = Item("t", "Table", "A table.", {"error": "%"}, (row,))
    text = item_text(Paper("p", "", "", "", "", (), (item,)), item, Store("cpu", tmp_path, tmp_path))
    assert "| a | 5 [1] |" in text
    assert "[1] it can't be" in text


def test_a_run_that_diverged_is_a_result(tmp_path: Path) -> None:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    run = Run("capsnet_small")
    store.write_diverged(Job(run, 0), run_spec(run, "smoke"), "step 3: |b| passed 100")
    item = Item("t", "Table", "A table.", {"error": "%"}, (Row("a", {"error": Cell(None, run)}),))
    value = Results(item, store).value(item.rows[0].cells["error"])
    assert value is not None
    assert ours(value, "%") == "diverged (1 of 1)"


def test_numbers_are_printed_as_they_can_be_read() -> None:
    assert ours(Value(8_215_568.0, 0, 0, None, 0), "parameters") == "8,215,568"
    assert published(Cell(8.21e6, Parameters(Run("capsnet_small"))), "parameters") == "8.21M"
    assert ours(Value(0.01234, 0.01234, 0.01234, None, 1), "ratio") == "0.0123, 1 seed"
    assert ours(None, "ratio") == "not run"


def test_a_record_is_not_taken_for_a_measurement_with_other_options(tmp_path: Path) -> None:
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    few, many = (Measure("m", nothing, options={"images": n}) for n in (10, 20))
    store.write_measure(Job(few, 0), {"a": 1.0}, 0.0)
    assert store.record(Job(few, 0)) is not None
    assert store.record(Job(many, 0)) is None


def test_what_an_analysis_returns_comes_back_from_its_record(tmp_path: Path) -> None:
    result = Alignment(
        names=("a", "b"),
        ratios=torch.rand(10, 6),
        std=torch.rand(10, 6),
        averages=torch.rand(6),
        n=tuple(range(10)),
        cosines=torch.rand(90, 3),
        moved=torch.rand(90, 3) > 0.5,
        labels=torch.arange(90) % 10,
        n_unmoved=3,
        reference=(0.462, 0.269),
        printed_reference=(0.308, 0.262),
        before_tanh=False,
    )
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    store.write_measure(Job(measured("m"), 0), result_to_dict(result), 0.0)
    fresh = Store("cpu", tmp_path / "results", tmp_path / "work").record(Job(measured("m"), 0))
    assert fresh is not None
    back = result_from_dict(Alignment, fresh["found"])
    assert back.names == result.names
    assert back.reference == result.reference
    assert torch.equal(back.moved, result.moved)
    assert torch.equal(back.averages, result.averages)
    assert torch.allclose(back.cosines, result.cosines, atol=1e-3)  # kept in half precision, to draw


def test_a_run_is_named_by_what_it_is() -> None:
    run = Run("sabour2017_mnist", {"routing": Dynamic(1)})
    same, other = Run("sabour2017_mnist", {"routing": Dynamic(1)}), Run("sabour2017_mnist")
    names = [run_spec(r, "cpu", seed).record_name() for r, seed in ((run, 0), (same, 5), (other, 0))]
    assert names[0] == names[1] != names[2]
    assert run_spec(run, "cpu", num_threads=1, data_dir="/somewhere").record_name() == names[0]


def test_the_report_says_what_did_not_run(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    write_report(Store("cpu", tmp_path / "results", tmp_path / "work"), out, "torchcaps report")
    text = out.read_text()
    for words in (
        "## sabour2017",
        "## yang2021",
        "not run",
        "0.25 ± 0.005",
        "8,215,568",
        "torchcaps reproduce chen2019",
    ):
        assert words in text
    assert "![" not in text, "a picture of nothing"


def test_runs_on_the_same_images_are_compared_image_by_image(tmp_path: Path) -> None:
    """McNemar's variance: 30 images right with a alone, 10 with b alone, of 10,000."""
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    runs = {"a": Run("capsnet_small"), "b": Run("capsnet_small", {"routing": Dynamic(1)})}
    right = torch.ones(10_000, dtype=torch.bool)
    a, b = right.clone(), right.clone()
    b[:30] = False
    a[30:40] = False
    a[100:300] = b[100:300] = False  # wrong with both: these say nothing of the difference
    for name, bits in (("a", a), ("b", b)):
        write_tested(store, runs[name], bits)
    rows = tuple(Row(name, {"error": Cell(None, run)}) for name, run in runs.items())
    item = Item("t", "Table", "A table.", {"error": "%"}, rows, (Claim("a is better", ("a", "error"), ("b", "error")),))
    (verdict,) = Results(item, store).verdicts()
    assert verdict.word == "holds"
    assert verdict.difference == pytest.approx(0.2)
    variance = (30 + 10 - 20**2 / 10_000) / 10_000 / 9_999
    assert verdict.half == pytest.approx(100 * 1.959964 * math.sqrt(variance))


def write_tested(store: Store, run: Run, bits: torch.Tensor, seed: int = 0) -> None:
    folder = store.folder(Job(run, seed))
    folder.path.mkdir(parents=True)
    folder.write_config(run_spec(run, "smoke", seed))
    n, n_right = len(bits), int(bits.sum())
    test = {"accuracy": n_right / n, "n": n, "n_right": n_right, "loss": 0.0}
    report = {"ended": "", "epochs": 1, "steps": 2, "seconds": 1.0, "weights": "last", "test": {"last": test}}
    folder.results.write_text(json.dumps({**report, "machine": {}}))
    store.write_run(Job(run, seed), bits)


def test_the_noise_of_seeds_is_pooled_over_the_runs_of_a_column(tmp_path: Path) -> None:
    """Rows with 10, 20 and 30, 50 wrong of 10,000: variances of 0.005 and 0.02 in per cent, two degrees of freedom."""
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    runs = {"a": Run("capsnet_small"), "b": Run("capsnet_small", {"routing": Dynamic(1)})}
    for name, wrong in (("a", (10, 20)), ("b", (30, 50))):
        for seed, count in enumerate(wrong):
            bits = torch.ones(10_000, dtype=torch.bool)
            bits[:count] = False
            write_tested(store, runs[name], bits, seed)
    rows = tuple(Row(name, {"error": Cell(None, run)}) for name, run in runs.items())
    item = Item("t", "Table", "A table.", {"error": "%"}, rows, (Claim("a is better", ("a", "error"), ("b", "error")),))
    results = Results(item, store)
    value = results.value(item.rows[0].cells["error"])
    assert value is not None
    of_images = 100 * wilson_interval(15, 10_000)[1] - 0.15
    of_seeds = 4.303 * math.sqrt(0.0125 / 2)
    assert value.high - value.mean == pytest.approx(math.hypot(of_images, of_seeds))
    (verdict,) = results.verdicts()
    assert verdict.word == "undecided"
    assert verdict.half > 4.303 * math.sqrt(2 * 0.0125 / 2)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (".json", b"{", "Expecting property name"),
        (".json", b"[]", "no fields"),
        (".json", b'{"found": {}}', "lacks"),
        (".npz", b"PK", "is no record"),
        (".npz", b"", "is no record"),
        (".npz", None, "missing beside it"),
    ],
)
def test_a_broken_record_is_named_or_passed_over(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    job = Job(measured("m"), 0)
    store.write_measure(job, {"many": torch.rand(100)}, 0.0)
    path = store.path(job).with_suffix(name)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RunError, match=words):
        Store("cpu", tmp_path / "results", tmp_path / "work").record(job)
    store.forgiving = True
    assert store.record(job) is None
    assert len(store.problems) == 1


def test_cells_cannot_break_a_table(tmp_path: Path) -> None:
    item = Item("t", "Table", "A table.", {"change": "mean |change|"}, (Row("a | b", {"change": Cell(1.0)}),))
    text = item_text(Paper("p", "", "", "", "", (), (item,)), item, Store("cpu", tmp_path, tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3}


def test_runs_on_other_images_are_not_compared_image_by_image(tmp_path: Path) -> None:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    runs = {"a": Run("capsnet_small"), "b": Run("capsnet_small", {"routing": Dynamic(1)})}
    bits = torch.ones(10_000, dtype=torch.bool)
    bits[:100] = False
    write_tested(store, runs["a"], bits)
    write_tested(store, runs["b"], bits[:5_000])
    rows = tuple(Row(name, {"error": Cell(None, run)}) for name, run in runs.items())
    item = Item("t", "Table", "A table.", {"error": "%"}, rows, (Claim("a is better", ("a", "error"), ("b", "error")),))
    (verdict,) = Results(item, store).verdicts()
    of_each = [wilson_interval(100, 10_000), wilson_interval(100, 5_000)]
    half = math.hypot(*(100 * (high - low) / 2 for low, high in of_each))
    assert verdict.half == pytest.approx(half)


def test_what_did_not_train_is_worse_and_two_of_them_say_nothing(tmp_path: Path) -> None:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    runs = {"a": Run("capsnet_small"), "b": Run("capsnet_small", {"routing": Dynamic(1)})}
    write_tested(store, runs["a"], torch.ones(10, dtype=torch.bool))
    store.write_diverged(Job(runs["b"], 0), run_spec(runs["b"], "smoke"), "step 3")
    rows = tuple(Row(name, {"error": Cell(None, run)}) for name, run in runs.items())
    item = Item("t", "Table", "A table.", {"error": "%"}, rows)
    results = Results(item, store)
    words = [
        results.verdict(Claim("it is better", (one, "error"), (other, "error"))).word
        for one, other in (("a", "b"), ("b", "a"), ("b", "b"))
    ]
    assert words == ["holds, the other did not train", "contradicted, it did not train", "neither trained"]


def test_measurements_share_the_noise_of_seeds_where_their_rows_say_so(tmp_path: Path) -> None:
    """0.90, 0.94 and 0.95, 0.97: variances of 0.0008 and 0.0002; the third row, far noisier, has its own."""
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    numbers = {"a": (0.90, 0.94), "b": (0.95, 0.97), "c": (0.2, 0.8)}
    for name, seeds in numbers.items():
        for seed, number in enumerate(seeds):
            store.write_measure(Job(measured(name), seed), {"read": number}, 1.0)
    words = {"a": "digit", "b": "digit", "c": ""}
    rows = tuple(Row(name, {"x": Cell(None, measured(name), "read")}, word) for name, word in words.items())
    results = Results(Item("t", "Table", "A table.", {"x": "ratio"}, rows), store)
    a, b, c = (results.value(row.cells["x"]) for row in rows)
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.mean - a.low == b.mean - b.low == pytest.approx(4.303 * math.sqrt(0.0005 / 2))
    assert b.high == 1, "a ratio is no larger"
    assert (c.low, c.high) == (0, 1)


def table_of(store: Store, wrong: dict[str, tuple[int, ...]], alike: dict[str, str]) -> Results:
    """A table of runs with so many of 10,000 images wrong, a number for each seed; b is to be better than a."""
    runs = {name: Run("capsnet_small", {"routing": Dynamic(place)}) for place, name in enumerate(wrong, start=1)}
    for name, counts in wrong.items():
        for seed, count in enumerate(counts):
            bits = torch.ones(10_000, dtype=torch.bool)
            bits[:count] = False
            write_tested(store, runs[name], bits, seed)
    rows = tuple(Row(name, {"error": Cell(None, run)}, alike.get(name, "")) for name, run in runs.items())
    return Results(Item("t", "Table", "A table.", {"error": "%"}, rows, (CLAIM,)), store)


CLAIM = Claim("b is better", ("b", "error"), ("a", "error"))


def test_a_difference_is_that_of_the_means_shown_whatever_seeds_there_are(tmp_path: Path) -> None:
    """2.0 % with three seeds (1.9, 2.0, 2.1), 1 % with one: what is known of the noise of one stands for both."""
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    (verdict,) = table_of(store, {"a": (190, 200, 210), "b": (100,)}, {"b": "other"}).verdicts()
    assert verdict.difference == pytest.approx(1.0)
    assert verdict.seeds == 1
    of_seeds = 4.303 * math.sqrt(0.01 / 3 + 0.01)
    assert of_seeds < verdict.half < 1.2 * of_seeds
    assert verdict.word == "holds"


def test_runs_whose_rows_say_so_have_a_noise_of_their_own(tmp_path: Path) -> None:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    results = table_of(store, {"a": (200, 210), "b": (100, 110), "c": (100, 900)}, {"c": "unsteady"})
    a, b, c = (results.value(row.cells["error"]) for row in results.item.rows)
    assert a is not None
    assert b is not None
    assert c is not None
    of_seeds = 4.303 * math.sqrt(0.005 / 2)
    of_images = 100 * wilson_interval(205, 10_000)[1] - 2.05
    assert a.high - a.mean == pytest.approx(math.hypot(of_images, of_seeds))
    assert b.high - b.mean < a.high - a.mean
    assert c.high > 50
    (verdict,) = results.verdicts()
    assert verdict.word == "holds"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("found", "n"), "gone", "'n' is no number"),
        (("found", "accuracy"), "x", "'accuracy' is no number"),
        (("found", "right"), "zz", "is no record"),
        (("found", "right"), "00", "a bit for each"),
        (("config",), [1], "lacks 'config'"),
        (("machine",), None, "lacks 'machine'"),
    ],
)
def test_a_record_of_a_run_with_a_broken_field_is_named(
    tmp_path: Path, place: tuple[str, ...], value: Any, words: str
) -> None:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    run = Run("capsnet_small")
    write_tested(store, run, torch.ones(100, dtype=torch.bool))
    path = store.path(Job(run, 0))
    record = json.loads(path.read_text())
    inner = record
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match=words) as raised:
        Store("smoke", tmp_path / "results", tmp_path / "work").record(Job(run, 0))
    assert str(path) in str(raised.value)


def test_two_numbers_of_one_measurement_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Errors of 60 and 20 %, with another GAN: the better net has 2 and 3 points less each time."""
    store = Store("cpu", tmp_path / "results", tmp_path / "work")
    for seed, (a, b) in enumerate(((58.0, 60.0), (17.0, 20.0))):
        found = {"a": a, "a_images": 40_000, "b": b, "b_images": 40_000}
        store.write_measure(Job(measured("gan"), seed), found, 1.0)
    rows = tuple(Row(name, {"error": Cell(None, measured("gan"), name)}) for name in ("a", "b"))
    claims = tuple(
        Claim("better", (one, "error"), (other, "error"), lower)
        for one, other, lower in (("a", "b", True), ("a", "b", False))
    )
    results = Results(Item("t", "Table", "A table.", {"error": "%"}, rows, claims), store)
    less, more = results.verdicts()
    of_images = [50 * (high - low) for low, high in (wilson_interval(n, 40_000) for n in (15_000, 16_000))]
    half = math.hypot(12.706 * math.sqrt(0.5 / 2), *of_images)
    assert (less.difference, more.difference) == (2.5, -2.5)
    assert less.half == more.half == pytest.approx(half)
