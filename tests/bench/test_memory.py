"""Peak memory of training in separate processes, and the cases of the memory benchmark."""

import os
from typing import Any

import pytest

from torchcaps.bench.memory import (
    ESTIMATE_CASES,
    MEMORY_CASES,
    TrainingCase,
    compare_with_estimates,
    compare_with_naive,
    measure_training_peaks,
    parse_estimate_case,
)
from torchcaps.training.errors import RunError


class Lethal:
    """An object that ends the process which unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_peak_contains_weights_gradients_and_optimizer_state() -> None:
    """35,445,522 parameters have four numbers of four bytes each with Adam; half the width has far fewer of them."""
    done: list[int] = []
    cases = {
        "full": TrainingCase("sabour2017_cnn_mnist", 1),
        "half": TrainingCase("sabour2017_cnn_mnist", 1, {"width": 128}),
    }
    peaks = measure_training_peaks(cases, lambda: done.append(1))
    assert done == [1, 1]
    expected = 16 * 35_445_522
    full = peaks["full"]
    assert expected < full.training_bytes < 1.6 * expected
    assert 0 < full.step_bytes < full.training_bytes < full.process_bytes
    # Each case has its own process: nothing is left of the first.
    assert peaks["half"].training_bytes < 0.7 * full.training_bytes


def test_killed_process_raises_run_error() -> None:
    with pytest.raises(RunError, match="capsnet_small"):
        measure_training_peaks({"case": TrainingCase("capsnet_small", 1, {"width": Lethal()})})


def test_estimate_cases_are_parsed() -> None:
    assert parse_estimate_case("sabour2017_mnist:64") == TrainingCase("sabour2017_mnist", 64, {"streamed": "auto"})
    assert parse_estimate_case("sabour2017_mnist:8:stored").options == {"streamed": False}
    assert parse_estimate_case("tsai2020_resnet18_cifar10:8:auto").options == {}  # no votes
    for text in ESTIMATE_CASES:
        assert text.startswith(f"{parse_estimate_case(text).model}:{parse_estimate_case(text).batch_size}:")


@pytest.mark.parametrize(
    "text", ["capsnet_smal:3", "capsnet_small", "capsnet_small:x", "capsnet_small:3:quickly", "capsnet_small:3:auto:1"]
)
def test_invalid_estimate_cases_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_estimate_case(text)


def test_rows_of_the_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """With peaks that are given: no process is started."""
    from torchcaps.bench import memory

    def peaks(cases: dict[str, TrainingCase]) -> dict[str, memory.TrainingPeak]:
        sizes = {True: 800, False: 100}
        return {name: memory.TrainingPeak(sizes[case.naive], sizes[case.naive], 1000) for name, case in cases.items()}

    monkeypatch.setattr(memory, "measure_training_peaks", peaks)
    small, large = (compare_with_naive(case) for case in MEMORY_CASES)
    assert small["naive"]["step_bytes"] == 8 * small["torchcaps"]["step_bytes"] == 800
    assert (small["model"], small["batch_size"], small["max_fraction"]) == ("tsai2020_cifar10", 16, 1 / 8)
    assert "naive" not in large
    assert large["max_process_bytes"] == 6 * 2**30
    (row,) = compare_with_estimates(["capsnet_small:4"])
    assert (row["case"], row["measured_bytes"]) == ("capsnet_small:4", 100)
    assert row["ratio"] == row["estimated_bytes"] / 100
