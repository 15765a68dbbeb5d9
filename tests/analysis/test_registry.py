"""The registry of analyses: declarations and subjects."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.models.narrow import narrow
from torchcaps.analysis import (
    ANALYSES,
    Analysis,
    AnalysisReport,
    Column,
    Subject,
    Summary,
    list_analyses,
    register_analysis,
    run_analysis,
)
from torchcaps.data import Loader, create_dataset


def subject(name: str = "small", n_images: int = 4) -> Subject:
    loader = Loader(create_dataset("digits", "test").subset(torch.arange(n_images)), 3, train=False)
    return Subject(name, narrow("capsnet_small"), loader, batch_size=2)


@pytest.mark.parametrize("name", list_analyses())
def test_every_declaration_is_complete(name: str) -> None:
    declared = ANALYSES.get(name)
    assert declared.name == name
    assert declared.description != ""
    assert declared.n_images is None or declared.n_images > 0
    for option in dataclasses.fields(declared.options):
        assert f"        {option.name}: " in (declared.options.__doc__ or ""), option.name
        assert option.default is not dataclasses.MISSING, option.name


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'affine'"):
        register_analysis(dataclasses.replace(ANALYSES.get("affine")))


def test_the_report_has_result_options_summary_and_figure(tmp_path: Path) -> None:
    report = run_analysis("dead", subject(), threshold=0.2)
    assert isinstance(report, AnalysisReport)
    assert report.options.threshold == report.result.threshold == 0.2
    assert isinstance(report.summary, Summary)
    assert {type(column) for column in report.summary.columns.values()} == {Column}
    assert report.draw(tmp_path / "dead.svg") == [tmp_path / "dead.svg"]
    assert "small" in (tmp_path / "dead.svg").read_text()


def test_a_subject_gives_batches_batch_counts_and_pixels() -> None:
    digits = subject(n_images=5)
    batch = digits.batch()
    assert batch.indices.tolist() == list(range(5))
    assert (digits.n_batches(), digits.n_batches(5)) == (3, 1)
    assert digits.classes == digits.loader.dataset.classes
    pixels = digits.pixels(digits.pixel_network())
    torch.testing.assert_close(pixels.images, batch.images)
    with pytest.raises(ValueError, match="open_training_set"):
        digits.training_set()
    limited = dataclasses.replace(
        digits, open_training_set=lambda n: digits.loader.dataset.subset(torch.arange(n or 5))
    )
    assert len(limited.training_set(2)) == 2


def test_a_subject_may_have_one_batch_of_images() -> None:
    digits = subject()
    in_memory = dataclasses.replace(digits, images=digits.batch())
    assert (in_memory.n_images, in_memory.classes) == (4, tuple("0123456789"))
    expected, result = (run_analysis("predictions", each).result for each in (digits, in_memory))
    torch.testing.assert_close(dataclasses.asdict(result), dataclasses.asdict(expected), rtol=0, atol=0)
    with pytest.raises(ValueError, match="Loader"):
        run_analysis("attack", in_memory)


def test_progress_is_tracked_with_the_number_of_steps() -> None:
    totals: list[int | None] = []
    calls: list[int] = []

    def track(n_steps: int | None):
        totals.append(n_steps)
        return lambda: calls.append(1)

    run_analysis("predictions", dataclasses.replace(subject(n_images=5), track=track))
    assert totals == [3]
    assert len(calls) == 3


def test_invalid_arguments_are_rejected() -> None:
    one, other = subject(), subject("other")
    cases = {
        "'afine'": lambda: run_analysis("afine", one),
        "'depth'": lambda: run_analysis("dead", one, depth=2),
        "'dead', got 2": lambda: run_analysis("dead", [one, other]),
        "'affine', got 0": lambda: run_analysis("affine", []),
        "'small', 'small'": lambda: run_analysis("affine", [one, subject()]),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert isinstance(ANALYSES.get("dead"), Analysis)


def test_pixels_are_on_the_device_of_the_model() -> None:
    given = subject()
    network = given.pixel_network()
    given.model.to("meta")
    batch = given.pixels(network)
    assert {tensor.device.type for tensor in (batch.images, batch.labels)} == {"meta"}
