"""Small runs, and comparisons of their results."""

from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import DATA, MODEL
from torchcaps.training import RunSpec, TrainResult, load_run
from torchcaps.training.checkpoint import Checkpoint, read_checkpoint
from torchcaps.training.logging import read_metrics


def small_spec(model: str = MODEL, **changes: Any) -> RunSpec:
    """A run of six steps on 70 images in batches of 16, unless ``changes`` say otherwise."""
    length = {} if "epochs" in changes else {"steps": 6}
    return RunSpec.of(model, **{"data": DATA, "batch_size": 16, "num_threads": 1, **length, **changes})


def last_checkpoint(result: TrainResult) -> Checkpoint:
    return read_checkpoint(result.path / "checkpoints/last.safetensors")


def last_weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return last_checkpoint(result).section("model")


def saved_spec(result: TrainResult) -> RunSpec:
    return load_run(result.path).spec


def assert_bit_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def different_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not bit-equal."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def metrics_without_time(directory: Path) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0} for row in read_metrics(directory / "metrics.csv")]


class StepClock:
    """A clock for which every training step takes the same time, and all else none."""

    def __init__(self, seconds_per_step: float) -> None:
        self.now, self.seconds_per_step = 0.0, seconds_per_step

    def __call__(self) -> float:
        return self.now

    def advance(self) -> None:
        self.now += self.seconds_per_step
