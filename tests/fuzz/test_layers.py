"""A fixed slice of the layers with adversarial values; ``make fuzz`` runs more of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fuzz.harness import fuzz
from tests.fuzz.layers import BATCH, PATHS, SMALLEST, LayerInput, Layers, draw_input, draw_values, evaluate_paths
from tests.sampling import all_cases
from torchcaps.nn import HomogeneousCapsules
from torchcaps.routing import Dynamic
from torchcaps.routing.base import ROUTINGS

N_LAYERS = 1000 if all_cases() else 100
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.pt"))


def test_results_of_adversarial_values_are_finite_or_rejected() -> None:
    report = fuzz(Layers(), seed=0, budget=N_LAYERS, isolated=False)
    assert report.failures == []
    assert report.n_evaluations <= N_LAYERS * BATCH * len(PATHS)
    assert {"finite", "outside"} <= set(report.by_outcome()) <= set(Layers.good)
    assert set(report.by_group()) == set(ROUTINGS.list())


def test_a_target_without_time_runs_one_case() -> None:
    """A run of ten minutes divided among many targets must not report success for one that was not run."""
    report = fuzz(Layers(), seed=0, budget=5, max_seconds=0, isolated=False)
    assert report.n_cases == 1


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_inputs_that_failed_before(path: Path) -> None:
    drawn = LayerInput.load(path)
    outcome, message = evaluate_paths(drawn)
    if outcome == "rejected-inside":  # the domain was larger then
        outcome = "outside"
    assert outcome in Layers.good, message


def test_failures_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without limit, tied parents of huge votes overflow; ordinary votes must not count as outside of the domain."""
    options = {"children": 6, "child_dim": 4, "parents": 3, "parent_dim": 4}
    tensors = {"pose": torch.full((1, 6, 4), 1e17), "weight": torch.ones(6, 4, 3, 4)}
    tensors["pose"][:, ::2] *= -1
    huge = LayerInput(Dynamic(), "dense", options, torch.float32, tensors, inside=False)
    assert evaluate_paths(huge) == ("outside", "")
    assert evaluate_paths(dataclasses.replace(huge, inside=True))[0] == "rejected-inside"
    monkeypatch.setattr(Dynamic, "max_vote", lambda self, dtype: None)
    assert evaluate_paths(huge)[0] == "accepted-outside"
    tensors["pose"][0, 0, 0] *= 1.5
    assert evaluate_paths(dataclasses.replace(huge, inside=True))[0] == "non-finite"


@pytest.mark.parametrize("training", [True, False])
def test_homogeneous_capsules_are_finite_inside_of_their_domain(training: bool) -> None:
    """They have no votes, so that `Layers` does not draw them."""
    for index in range(40):
        rng = np.random.default_rng([0, index])
        exponent = max(0.0, rng.uniform(-30, 15.3))
        images = draw_values((int(rng.integers(1, 5)), 3, 2, 3), exponent, SMALLEST[torch.float32], rng)
        features = torch.tensor(images).float().requires_grad_()
        layer = HomogeneousCapsules(3, (2, 3), 4).train(training)
        pose = layer(features).pose
        pose.backward(torch.arange(pose.numel()).view(pose.shape).cos())
        for result in (pose, features.grad, layer.weight.grad, *layer.norm.buffers()):
            assert result is not None
            assert bool(torch.isfinite(result).all()), index


def test_inputs_are_reproducible_and_can_be_saved(tmp_path: Path) -> None:
    first, again = (draw_input(np.random.default_rng([0, 3])) for _ in range(2))
    assert isinstance(first, LayerInput)
    assert str(first) == str(again)
    first.save(tmp_path / "input.pt")
    loaded = LayerInput.load(tmp_path / "input.pt")
    assert (loaded.routing, loaded.kind, loaded.dtype, loaded.inside) == (
        first.routing,
        first.kind,
        first.dtype,
        first.inside,
    )
    assert loaded.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert isinstance(first.routing, type(loaded.routing))
    assert evaluate_paths(LayerInput(Dynamic(), "dense", {"children": 1, "child_dim": 1, "parents": 1, "parent_dim": 1},
                                     torch.float32, {"pose": torch.zeros(1, 1, 1)})) == ("finite", "")  # fmt: skip
