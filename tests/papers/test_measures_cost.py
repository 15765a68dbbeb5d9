"""Costs on a clock of our own: a network's forward pass takes as long as the test says, and nothing else takes time."""

import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcaps
from tests.tolerances import SAME
from torchcaps.papers.measures import cost
from torchcaps.papers.measures.cost import epoch_seconds, iteration_cost, layer_counts, net_cost, routing_seconds
from torchcaps.reproduce.context import Context
from torchcaps.routing import Dynamic, InvertedAttention, Quadratic

CONTEXT = Context("smoke", 0, Path("none"))
CLOSE = SAME[torch.float64]


class Clock:
    """Seconds that pass when a network looks at images: by what it is, and slower the first and the last time."""

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def perf_counter(self) -> float:
        return self.now

    def create_model(self, name: str, **fields: Any) -> Any:
        model: Any = torchcaps.create_model(name, **fields)
        slow = self.noise()
        key = name if name in self.seconds else model.spec.effective_routing

        def look(*_: Any) -> None:
            self.now += self.seconds[key] * next(slow)

        model.register_forward_pre_hook(look)
        return model

    def noise(self) -> Iterator[float]:
        yield from (7, 7)  # the first step, with its step of ascent where there is one
        while True:
            yield from (1, 1, 3, 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock({})
    monkeypatch.setattr(cost, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(cost, "create_model", clock.create_model)
    return clock


def test_an_epoch_is_as_many_of_the_quickest_steps_as_it_has_batches(clock: Clock) -> None:
    """60,000 images in batches of 4 are 15,000 steps, of 2 and 6 ms."""
    clock.seconds = {"choi2019_mnist": 0.002, "sabour2017_mnist": 0.006}
    found = epoch_seconds(CONTEXT, {"ours": "choi2019_mnist", "theirs": "sabour2017_mnist"}, batch=4, repeat=4)
    assert found["ours"] == pytest.approx(30, rel=CLOSE)
    assert found["theirs"] == pytest.approx(90, rel=CLOSE)
    assert found["ratio"] == pytest.approx(3, rel=CLOSE), "the last over the first"
    assert epoch_seconds(CONTEXT, {"ours": "choi2019_mnist"}, 6_000, 4, 4)["ours"] == pytest.approx(3, rel=CLOSE)


def test_the_quadratic_program_is_timed_with_its_ascent(clock: Clock) -> None:
    """A step of dynamic routing looks once, 0.4 s; one of the program twice: 0.3 s with L2, 0.5 s with L1."""
    l2, l1 = (Quadratic(penalty, initial=0.1) for penalty in ("l2", "l1"))
    clock.seconds = {Dynamic(3): 0.4, l2: 0.15, l1: 0.25}
    found = routing_seconds(CONTEXT, "yang2021_mnist", batch=2, repeat=3)
    for name, seconds in (("dynamic", 40), ("l2", 30), ("l1", 50), ("l2_saved", 25), ("l1_saved", -25)):
        assert found[name] == pytest.approx(seconds, rel=CLOSE), name


def test_inference_and_memory_grow_by_iterations(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a batch, and MiB of 1,048,576 bytes."""
    monkeypatch.setattr(cost, "training_peaks", peaks)
    names = {"dynamic": "tsai2020_dynamic_cifar10", "inverted": "tsai2020_cifar10"}
    clock.seconds = {Dynamic(1): 0.01, Dynamic(2): 0.02, InvertedAttention(1): 0.03, InvertedAttention(2): 0.06}
    found = iteration_cost(CONTEXT, names, iterations=2, batch=2, repeat=3)
    assert found["iterations"] == 2
    times = [found[f"{label} seconds {n}"] for label in ("dynamic", "inverted") for n in (1, 2)]
    assert times == pytest.approx([10, 20, 30, 60], rel=CLOSE)
    memory = [found[f"{label} memory {n}"] for label in ("dynamic", "inverted") for n in (1, 2)]
    assert memory == [1, 2, 1, 2], "two images, and as many MiB as iterations"


def test_nets_are_measured_by_their_labels(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "training_peaks", peaks)
    clock.seconds = {"tsai2020_diverse_cnn": 0.01, "tsai2020_diverse_vector": 0.04}
    nets = {"CNN": "tsai2020_diverse_cnn", "CapsNet, vectors": "tsai2020_diverse_vector"}
    found = net_cost(CONTEXT, nets, batch=2, repeat=3)
    assert [found["CNN seconds"], found["CapsNet, vectors seconds"]] == pytest.approx([10, 40], rel=CLOSE)
    assert [found["CNN memory"], found["CapsNet, vectors memory"]] == [9, 2]


def peaks(cases: Mapping[str, tuple[str, Mapping[str, Any]]], batch: int, tick: Callable[[], object]) -> dict[str, int]:
    """As many MiB as there are iterations; nine where there is no routing."""
    assert batch == 2
    iterations = {k: torchcaps.create_model(name, **fields).spec for k, (name, fields) in cases.items()}
    return {k: 2**20 * getattr(getattr(spec, "algorithm", None), "iterations", 9) for k, spec in iterations.items()}


def test_layers_are_counted_by_their_names() -> None:
    """Sabour 2017 by hand: 9x9 windows with biases; 1,152 capsules of 8 to 10 of 16; three layers of a decoder."""
    prefixes = {"conv": "front.conv1", "primary": "front.primary", "digit": "capsules.", "decoder": "decoder."}
    found = layer_counts(CONTEXT, "sabour2017_mnist", prefixes | {"what no name begins with": "weight"})
    by_hand = {
        "conv": 256 * 82,
        "primary": 256 * (256 * 81 + 1),
        "digit": 1_152 * 8 * 160,
        "decoder": 161 * 512 + 513 * 1_024 + 1_025 * 784,
        "what no name begins with": 0,
    }
    assert found == by_hand | {"total": sum(by_hand.values())}
