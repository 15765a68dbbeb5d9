"""Half-length companions: half the steps or epochs, and schedules that are complete in half the time."""

import dataclasses
from typing import Any

import pytest

from torchcaps.data.datasets.multimnist import DiverseMultiMNIST, MultiMNIST
from torchcaps.models.recipe import LossConfig
from torchcaps.models.schedules import (
    Constant,
    Exponential,
    Inverse,
    LRSchedule,
    Milestones,
    OneCycle,
    Product,
    TimeDecay,
)
from torchcaps.papers import list_papers
from torchcaps.reproduce.half_length import half_length_spec
from torchcaps.reproduce.scales import SCALES, run_spec
from torchcaps.reproduce.schema import Measurement, Run
from torchcaps.training import RunSpec


def halved_length(**changes: Any) -> tuple[int | None, int | None]:
    """Return epochs and steps of the companion of a run of 20,000 images of MNIST in batches of 128: 157 per epoch."""
    settings: dict[str, Any] = {"data": "mnist", "max_train_images": 20_000, "batch_size": 128, "val_fraction": 0.0}
    recipe = half_length_spec(RunSpec.of("capsnet_small", **(settings | changes))).recipe
    return recipe.epochs, recipe.steps


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"epochs": 4}, (2, None)),
        ({"epochs": 5}, (None, 392)),  # 785 steps
        ({"epochs": 1}, (None, 78)),
        ({"epochs": 5, "val_fraction": 0.1}, (None, 352)),  # 18,000 images, 141 per epoch
        ({"epochs": 5, "max_train_images": None}, (None, 1172)),  # 60,000 images, 469 per epoch
        ({"epochs": 5, "max_train_images": 80_000}, (None, 1172)),
        ({"epochs": 5, "data": "diverse-multimnist"}, (None, 392)),
        ({"steps": 1500}, (None, 750)),
        ({"steps": 395}, (None, 197)),
        ({"steps": 1}, (None, 1)),
    ],
)
def test_epochs_or_steps_are_halved(changes: dict[str, Any], length: tuple[int | None, int | None]) -> None:
    assert halved_length(**changes) == length


def test_odd_epochs_of_a_set_of_unknown_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="multimnist") as raised:
        halved_length(epochs=5, data="multimnist", max_train_images=None)
    assert "5 epochs" in str(raised.value)


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(),
        Exponential(0.96, 200),
        Exponential(0.5, 100, floor=0.01, staircase=True),
        Milestones((2, 6), 0.1),
        TimeDecay(1e-2),
        Inverse(1e-2, 0.75),
        OneCycle(),
        Product(TimeDecay(1e-2), Milestones((4,), 0.5)),
    ],
    ids=repr,
)
def test_the_schedule_runs_through_the_same_factors_in_half_the_time(schedule: LRSchedule) -> None:
    """1,000 steps in 10 epochs, compared with 500 steps in 5 epochs."""
    spec = RunSpec.of("capsnet_small", data="mnist", epochs=10, lr_schedule=schedule)
    halved = half_length_spec(spec).recipe.lr_schedule
    full = [schedule.factor(2 * step, 2 * step // 100, 1000) for step in range(0, 500, 50)]
    half = [halved.factor(step, step // 100, 500) for step in range(0, 500, 50)]
    tolerance = 1e-2 if isinstance(schedule, OneCycle) else 1e-9  # it reaches its last factor one step before the end
    assert half == pytest.approx(full, rel=tolerance, abs=1e-3 if isinstance(schedule, OneCycle) else 0)


def test_the_margin_of_the_spread_loss_grows_in_half_the_steps() -> None:
    for name, schedule, steps in (("spread", "linear", 197), ("spread", "constant", 395), ("margin", "linear", 395)):
        loss = LossConfig(name, margin_schedule=schedule, margin_steps=395)  # type: ignore[arg-type]
        halved = half_length_spec(RunSpec.of("tsai2020_em_cifar10", steps=395, loss=loss)).recipe
        assert (name, schedule, halved.loss.margin_steps) == (name, schedule, steps)
        assert halved.steps == 197
        assert dataclasses.replace(halved.loss, margin_steps=395) == loss


def test_a_target_accuracy_is_replaced_by_that_with_twice_the_error() -> None:
    spec = half_length_spec(RunSpec.of("capsnet_small", steps=100, target_accuracy=0.97, max_minutes=5.0))
    assert (spec.target_accuracy, spec.max_minutes, spec.recipe.steps) == (0.94, 2.5, 50)


def test_a_companion_differs_in_nothing_else_and_has_a_record_of_its_own() -> None:
    run = Run("sabour2017_mnist", {"batch_size": 100}, cpu={"epochs": 4, "lr_schedule": OneCycle()})
    full, half = run_spec(run, "cpu", seed=3), run_spec(run.halved(), "cpu", seed=3)
    differing = {name for name, value in full.identity().items() if half.identity()[name] != value}
    assert differing == {"epochs"}
    assert half.seed == 3
    assert half.record_name() != full.record_name()
    assert run_spec(run.replace(cpu={"epochs": 2}), "cpu").record_name() == half.record_name()  # the same training


def test_a_measurement_is_halved_with_its_runs_and_dependencies() -> None:
    gan = Measurement("gan", dict)
    net = Measurement("net", dict, {"net": Run("capsnet_small")})
    assert gan.halved() is gan
    halved = dataclasses.replace(net, depends_on={"gan": gan, "net": net}).halved()
    assert (halved.name, halved.runs["net"].half_length, halved.half_length) == ("net-half", True, True)
    assert halved.depends_on == {"gan": gan, "net": net.halved()}
    assert Measurement("reader", dict, depends_on={"net": net}).halved().half_length
    assert not net.half_length


def test_every_declared_companion_has_a_length_at_every_scale() -> None:
    """A specification that can't be halved raises a ValueError."""
    for paper in list_papers():
        for item in paper.items:
            for source in item.half_length_sources():
                runs = [source] if isinstance(source, Run) else list(getattr(source, "runs", {}).values())
                lengths = [(run_spec(run, scale).recipe, scale) for run in runs for scale in SCALES]
                assert all(r.steps or r.epochs for r, _ in lengths), (paper.name, item.name)


def test_every_claim_has_a_companion_or_a_reason() -> None:
    missing = []
    for paper in list_papers():
        for item in paper.items:
            for claim in (claim for claim in item.claims if claim.convergence == "training"):
                sources = [item.cell(*location).source for location in (claim.better, claim.worse)]
                trained = [s for s in sources if isinstance(s, Run | Measurement) and s.halved() != s]
                missing += [] if trained else [(paper.name, item.name, claim.text)]
    assert missing == []


def test_chance_accuracy_of_sets_of_digits() -> None:
    assert MultiMNIST().chance_accuracy() == pytest.approx(1 / 45)
    assert DiverseMultiMNIST().chance_accuracy() == pytest.approx(5 / 6 / 45)
    assert DiverseMultiMNIST(single_probability=0.5).chance_accuracy() == pytest.approx(0.05)
