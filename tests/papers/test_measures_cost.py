"""Cost measurements with a simulated clock, which only forward passes advance."""

import math
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcaps
from tests.tolerances import SAME
from torchcaps.bench.memory import TrainingCase, TrainingPeak
from torchcaps.papers.measures import cost
from torchcaps.papers.measures.cost import (
    epoch_seconds,
    iteration_cost,
    model_cost,
    parameters_per_layer,
    routing_seconds,
    step_seconds,
)
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.routing import Dynamic, InvertedAttention, Quadratic

CONTEXT = MeasurementContext("smoke", 0, Path("none"))
CLOSE = SAME[torch.float64]


class SimulatedClock:
    """A clock that each forward pass advances by the seconds of its model or routing; some passes are slower."""

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        """Return CPU time, during which other processes have not run."""
        return self.now / 2

    def create_model(self, name: str, **fields: Any) -> Any:
        model: Any = torchcaps.create_model(name, **fields)
        factors = self.slowdowns()
        key = name if name in self.seconds else model.spec.effective_routing

        def advance(*_: Any) -> None:
            self.now += self.seconds[key] * next(factors)

        model.register_forward_pre_hook(advance)
        return model

    def slowdowns(self) -> Iterator[float]:
        yield from (7, 7)  # the warm-up step, with its ascent if there is one
        while True:
            yield from (1, 1, 3, 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock({})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(
        cost, "time", types.SimpleNamespace(perf_counter=clock.perf_counter, process_time=clock.process_time)
    )
    monkeypatch.setattr(cost, "create_model", clock.create_model)
    return clock


def test_cpu_time_is_measured_with_one_thread(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.seconds = {"chen2019_dynamic_mnist": 0.04}
    for threads, milliseconds in ((1, 20), (2, 40)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results = step_seconds(CONTEXT, {"routing": "chen2019_dynamic_mnist"}, batch_size=2, repeats=4)
        assert results["routing inference"] == pytest.approx(milliseconds, rel=CLOSE)


def test_an_epoch_is_extrapolated_from_the_fastest_step(clock: SimulatedClock) -> None:
    """60,000 images in batches of 4 are 15,000 steps, of 2 and 6 ms."""
    clock.seconds = {"choi2019_mnist": 0.002, "sabour2017_mnist": 0.006}
    results = epoch_seconds(CONTEXT, {"ours": "choi2019_mnist", "theirs": "sabour2017_mnist"}, batch_size=4, repeats=4)
    assert results["ours"] == pytest.approx(30, rel=CLOSE)
    assert results["theirs"] == pytest.approx(90, rel=CLOSE)
    # the four repetitions take 7, 1, 1 and 3 times as long: a standard deviation of the root of 8
    of_mean = 3.182 * math.sqrt(8 / 4)
    assert [results[f"{name}_ci95"] for name in ("ours", "theirs")] == pytest.approx([30 * of_mean, 90 * of_mean])
    assert results["ratio"] == pytest.approx(3, rel=CLOSE)
    assert results["fraction"] == pytest.approx(1 / 3, rel=CLOSE)
    assert epoch_seconds(CONTEXT, {"ours": "choi2019_mnist"}, 6_000, 4, 4)["ours"] == pytest.approx(3, rel=CLOSE)


def test_an_epoch_is_timed_with_the_options_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    images = {}

    def create_model(name: str, **fields: Any) -> Any:
        images[name] = fields.get("image")
        return torchcaps.create_model(name, **fields)

    monkeypatch.setattr(cost, "create_model", create_model)
    models = {"ours": "choi2019_mnist", "theirs": "sabour2017_mnist"}
    options = {"theirs": {"image": (3, 32, 32)}}
    epoch_seconds(CONTEXT, models, batch_size=2, repeats=1, model_options=options)
    assert images == {"choi2019_mnist": None, "sabour2017_mnist": (3, 32, 32)}


def test_quadratic_routing_is_timed_with_its_ascent(clock: SimulatedClock) -> None:
    """A step of dynamic routing has one forward pass, 0.4 s; quadratic routing has two: 0.3 s (L2), 0.5 s (L1).

    With reused children it has one.
    """
    l2, l1 = (Quadratic(penalty, initial=0.1) for penalty in ("l2", "l1"))
    clock.seconds = {Dynamic(3): 0.4, l2: 0.15, l1: 0.25}
    results = routing_seconds(CONTEXT, "yang2021_mnist", batch_size=2, repeats=3)
    expected = {"dynamic": 40, "l2": 30, "l1": 50, "l2_saved": 25, "l1_saved": -25}
    expected |= {"l2_reused": 15, "l1_reused": 25, "l2_reused_saved": 62.5, "l1_reused_saved": 37.5}
    assert {name: results[name] for name in expected} == pytest.approx(expected, rel=CLOSE)


def test_time_saved_relative_to_the_first_model(clock: SimulatedClock) -> None:
    """Each step and each inference has one forward pass: 0.04 s and 0.03 s, a quarter less."""
    clock.seconds = {"chen2019_dynamic_mnist": 0.04, "chen2019_fc_mnist": 0.03}
    models = {"routing": "chen2019_dynamic_mnist", "none": "chen2019_fc_mnist"}
    results = step_seconds(CONTEXT, models, batch_size=2, repeats=4)
    expected = {"routing training": 4, "none training": 3, "none training_saved": 25}
    expected |= {"routing inference": 40, "none inference": 30, "none inference_saved": 25}
    assert {name: results[name] for name in expected} == pytest.approx(expected, rel=CLOSE)


def test_inference_time_and_memory_by_iterations(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a batch, and MiB of 1,048,576 bytes."""
    monkeypatch.setattr(cost, "measure_training_peaks", fake_peaks)
    names = {"dynamic": "tsai2020_dynamic_cifar10", "inverted": "tsai2020_cifar10"}
    clock.seconds = {Dynamic(1): 0.01, Dynamic(2): 0.02, InvertedAttention(1): 0.03, InvertedAttention(2): 0.06}
    results = iteration_cost(CONTEXT, names, iterations=2, batch_size=2, repeats=3)
    assert results["iterations"] == 2
    times = [results[f"{label} milliseconds {n}"] for label in ("dynamic", "inverted") for n in (1, 2)]
    assert times == pytest.approx([10, 20, 30, 60], rel=CLOSE)
    memory = [results[f"{label} memory {n}"] for label in ("dynamic", "inverted") for n in (1, 2)]
    assert memory == [1, 2, 1, 2]


def test_models_are_measured_by_label(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure_training_peaks", fake_peaks)
    clock.seconds = {"tsai2020_diverse_cnn": 0.01, "tsai2020_diverse_vector": 0.04}
    models = {"CNN": "tsai2020_diverse_cnn", "CapsNet, vectors": "tsai2020_diverse_vector"}
    results = model_cost(CONTEXT, models, batch_size=2, repeats=3)
    assert [results["CNN milliseconds"], results["CapsNet, vectors milliseconds"]] == pytest.approx([10, 40], rel=CLOSE)
    assert [results["CNN memory"], results["CapsNet, vectors memory"]] == [9, 2]


def fake_peaks(cases: Mapping[str, TrainingCase], on_case_done: Callable[[], object]) -> dict[str, TrainingPeak]:
    """Return one MiB per routing iteration, nine without routing."""
    peaks = {}
    for name, case in cases.items():
        assert case.batch_size == 2
        spec = torchcaps.create_model(case.model, **case.options).spec
        iterations = getattr(getattr(spec, "effective_routing", None), "iterations", 9)
        peaks[name] = TrainingPeak(2**20 * iterations, 0, 0)
    return peaks


def test_parameters_are_counted_by_prefix() -> None:
    """Sabour 2017 by hand: 9x9 windows with biases; 1,152 capsules of 8 to 10 of 16; three layers of a decoder."""
    prefixes = {"conv": "front.conv1", "primary": "front.primary", "digit": "capsules.", "decoder": "decoder."}
    results = parameters_per_layer(CONTEXT, "sabour2017_mnist", prefixes | {"unknown": "weight"})
    expected = {
        "conv": 256 * 82,
        "primary": 256 * (256 * 81 + 1),
        "digit": 1_152 * 8 * 160,
        "decoder": 161 * 512 + 513 * 1_024 + 1_025 * 784,
        "unknown": 0,
    }
    assert results == expected | {"total": sum(expected.values())}
