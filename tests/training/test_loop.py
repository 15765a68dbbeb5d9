"""The loop: what it computes, step by step, against the plain definition."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerances import SAME, relative_rms
from tests.training.own import CHOI, DATA, MODEL
from torchcaps._core.random import step_seed
from torchcaps.data import Loader
from torchcaps.models import LossConfig, OptimizerConfig
from torchcaps.models.schedules import Exponential, Inverse, LRSchedule, Milestones, OneCycle, Product, TimeDecay
from torchcaps.training import DivergenceError, Result, RunError, RunSpec, train
from torchcaps.training.checkpoint import Checkpoint, read_checkpoint
from torchcaps.training.inference import load_run
from torchcaps.training.logging import read_metrics
from torchcaps.training.setup import make_network, open_images
from torchcaps.training.trainer import Training


def small(model: str = MODEL, **changes: Any) -> RunSpec:
    long = {} if "epochs" in changes else {"steps": 6}
    changes = {"data": DATA, "batch_size": 16, "num_threads": 1, **long, **changes}
    return RunSpec.of(model, **changes)


def last(result: Result) -> Checkpoint:
    return read_checkpoint(result.folder / "checkpoints/last.safetensors")


def weights(result: Result) -> dict[str, torch.Tensor]:
    return last(result).part("model")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def by_hand(spec: RunSpec, n_steps: int) -> dict[str, torch.Tensor]:
    """The same training, written out."""
    images = open_images(spec)
    model = make_network(spec)
    model.train()
    loss, recipe = model.loss(), spec.recipe
    optimizer = recipe.optimizer.make(model.parameters())
    loader = Loader(images.train, recipe.batch_size, pipeline=images.pipeline, seed=spec.seed)
    step, epoch = 0, 0
    while step < n_steps:
        for batch in loader.epoch(epoch):
            if step == n_steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(step, epoch, n_steps)
            torch.manual_seed(step_seed(spec.seed, step, 0))
            optimizer.zero_grad()
            loss(model(batch.images, batch.labels), batch.labels, batch.targets, step).backward()
            optimizer.step()
            step += 1
        epoch += 1
    return dict(model.state_dict())


LOSSES = {
    "margin": lambda: small(),
    "spread": lambda: small(
        routing="em", loss=LossConfig("spread", margin_schedule="linear", margin_steps=5), reconstruction=False
    ),
    "cross-entropy": lambda: small("capsnet_images", data=DATA, width=8, stages=((4, 1),), types=2, blocks=1, steps=3),
    "binary": lambda: small(
        "tsai2020_diverse_vector",
        data="diverse-multimnist",
        data_options={"source": "digits"},
        width=8,
        types=2,
        steps=2,
        batch_size=4,
        max_test_images=8,
    ),
    "two targets": lambda: small(
        data="multimnist", data_options={"source": "digits"}, image=(1, 36, 36), n_objects=2, steps=2, max_test_images=8
    ),
    "dropout": lambda: small("choi2019_mnist", model_options=CHOI, val_fraction=0.0, eval_weights="last"),
    "sgd": lambda: small(optimizer=OptimizerConfig("sgd", 0.1, weight_decay=1e-3)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_computes_what_the_plain_loop_does(name: str, tmp_path: Path) -> None:
    """Every loss, one and several targets, dropout and augmentation, over the end of an epoch."""
    spec = LOSSES[name]()
    result = train(spec, tmp_path / "run")
    spec = result_spec(result)
    expected = by_hand(spec, spec.recipe.steps or 0)
    found = weights(result)
    assert found.keys() == expected.keys()
    assert same(found, expected)


def result_spec(result: Result) -> RunSpec:
    return load_run(result.folder).spec


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Exponential(0.96, 2), lambda step, epoch: 0.96 ** (step / 2)),  # continuous, no staircase
        (TimeDecay(0.1), lambda step, epoch: 1 / (1 + 0.1 * step)),
        (Inverse(0.1, 0.75), lambda step, epoch: (1 + 0.1 * step) ** -0.75),
        (Milestones((1, 2), 0.1), lambda step, epoch: 0.1 ** ((epoch >= 1) + (epoch >= 2))),
        (
            Product(TimeDecay(0.1), Milestones((1,), 0.5)),
            lambda step, epoch: (1 if epoch < 1 else 0.5) / (1 + 0.1 * step),
        ),
    ],
)
def test_trap_16_24_rates_are_those_of_the_papers_at_every_step(
    schedule: LRSchedule, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, float]] = []
    plain = Training._clipped

    def noted(self: Training) -> float:
        seen.append((self.state.step, self.state.epoch, self.optimizer.param_groups[0]["lr"]))
        return plain(self)

    monkeypatch.setattr(Training, "_clipped", noted)
    train(small(lr_schedule=schedule, epochs=3, optimizer=OptimizerConfig("adam", 2e-3)), tmp_path / "run")
    assert len(seen) == 15  # 70 images, batches of 16: five a time, the last of six images
    assert [epoch for _, epoch, _ in seen] == [0] * 5 + [1] * 5 + [2] * 5
    for step, epoch, rate in seen:
        assert rate == pytest.approx(2e-3 * wanted(step, epoch), rel=1e-12)


def test_every_image_is_used_once_in_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    plain = Training._step

    def noted(self: Training, batch: Any) -> None:
        used.extend(batch.indices.tolist())
        plain(self, batch)

    monkeypatch.setattr(Training, "_step", noted)
    train(small(epochs=2), tmp_path / "run")
    assert sorted(used[:70]) == sorted(used[70:]) == list(range(70))
    assert used[:70] != used[70:]


def test_a_batch_in_pieces_has_the_gradient_of_the_whole(tmp_path: Path) -> None:
    whole = weights(train(small(steps=5), tmp_path / "whole"))
    pieces = weights(train(small(steps=5, micro_batches=3), tmp_path / "pieces"))
    for name in whole:
        assert relative_rms(pieces[name], whole[name]) < SAME[torch.float32], name
    assert not same(whole, pieces)  # it did go another way


def test_clipping_shortens_long_gradients_and_no_others(tmp_path: Path) -> None:
    plain = dataclasses.replace(
        small(steps=1),
        recipe=dataclasses.replace(small().recipe, optimizer=OptimizerConfig("sgd", 1.0, 0.0), steps=1, epochs=None),
    )
    start = dict(make_network(plain).state_dict())
    moved = {}
    for clip in (None, 1e6, 1e-3):
        result = train(dataclasses.replace(plain, max_grad_norm=clip), tmp_path / str(clip))
        now = weights(result)
        rate = plain.recipe.lr_at(0, 0, 1)
        moved[clip] = float(torch.cat([(now[n] - start[n]).flatten() for n in now]).norm() / rate)
    assert moved[None] == moved[1e6] > 0.01
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)


def test_the_average_of_the_weights_is_kept_and_counts(tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    for steps in range(1, 5):
        seen.append(weights(train(small(steps=steps, lr_schedule=TimeDecay(0.0)), tmp_path / f"{steps}")))
    mean = dict(make_network(small()).state_dict())
    for n, now in enumerate(seen):
        d = min(0.9, (1 + n) / (10 + n))
        mean = {name: d * mean[name] + (1 - d) * now[name] for name in mean}
    result = train(small(steps=4, lr_schedule=TimeDecay(0.0), eval_weights="ema", ema_decay=0.9), tmp_path / "average")
    kept = last(result).part("ema")
    for name in mean:
        assert relative_rms(kept[name], mean[name]) < SAME[torch.float32]
    assert set(result.tests) == {"last", "ema"}
    assert result.test is result.tests["ema"]
    model = load_run(result.folder).model
    assert same(dict(model.state_dict()), {name: kept[name] for name in mean})


def test_workers_precision_and_determinism_are_options(tmp_path: Path) -> None:
    plain = weights(train(small(steps=4), tmp_path / "plain"))
    assert same(weights(train(small(steps=4, num_workers=1), tmp_path / "workers")), plain)
    try:
        assert same(weights(train(small(steps=4, deterministic=True), tmp_path / "deterministic")), plain)
    finally:
        torch.use_deterministic_algorithms(False)
    half = train(small(steps=4, precision="bf16-mixed"), tmp_path / "half")
    assert all(tensor.dtype == torch.float32 for tensor in weights(half).values())
    assert not same(weights(half), plain)
    double = train(small(steps=2, precision="64-true"), tmp_path / "double")
    assert {tensor.dtype for tensor in weights(double).values()} == {torch.float64}


def test_minutes_bound_a_run_and_lay_out_its_schedule(tmp_path: Path) -> None:
    result = train(small(epochs=10_000, max_minutes=0.05, lr_schedule=OneCycle(last=0.0)), tmp_path / "run")
    assert 1 < result.seconds < 20
    assert result.steps > 20
    state = last(result).state["run"]
    assert state["plan"] >= 21
    # Either the plan was carried out, and the rate went down to nothing, or the time was up before.
    rows = read_metrics(result.folder / "metrics.csv")
    assert (result.steps == state["plan"] and rows[-1]["rate"] == 0) or result.ended == "its time is up"


def test_a_value_that_is_no_number_is_traced_to_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(self: Training, batch: Any) -> None:
        if self.state.step == 3:
            self.network.front.conv1.register_forward_hook(lambda m, i, o: o / 0)
        plain(self, batch)

    plain = Training._step
    monkeypatch.setattr(Training, "_step", spoil)
    with pytest.raises(
        RunError, match=r"step 4: .* arose in the layer front.conv1. The last good checkpoint is .*last.saf"
    ):
        train(small(checkpoint_interval_steps=2), tmp_path / "run")
    kept = read_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    assert kept.state["run"]["step"] == 2
    assert all(bool(torch.isfinite(t).all()) for t in kept.part("model").values() if t.is_floating_point())


def test_a_gradient_that_is_no_number_stops_before_it_reaches_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Training, batch: Any) -> None:
        if self.state.step == 2:
            self.network.decoder.layers[0].weight.register_hook(lambda g: g * float("nan"))
        plain(self, batch)

    plain = Training._step
    monkeypatch.setattr(Training, "_step", spoil)
    with pytest.raises(RunError, match=r"step 3: .* arose in the gradient of decoder.layers.0.weight"):
        train(small(), tmp_path / "run")


def test_a_learning_rate_that_is_far_too_high_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"step \d+: the first value that is no finite number .*--optimizer.lr"):
        train(small(optimizer=OptimizerConfig("sgd", 1e38), steps=20, lr_schedule=TimeDecay(0.0)), tmp_path / "run")


def test_quadratic_routing_takes_its_step_of_ascent_with_labels(tmp_path: Path) -> None:
    result = train(small(routing="quadratic", steps=3), tmp_path / "run")
    start = make_network(result_spec(result)).state_dict()
    (name,) = [name for name in start if name.endswith("coefficient")]
    assert not torch.equal(weights(result)[name], start[name])
    still = train(small(routing="quadratic", steps=3, ascents=0), tmp_path / "still")
    assert torch.equal(weights(still)[name], start[name])


def test_routing_that_runs_away_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    from torchcaps.routing import Quadratic

    with pytest.raises(DivergenceError, match=r"step 1: the coefficients of Quadratic routing ran away"):
        train(small(routing=Quadratic(rate=1e6), steps=3), tmp_path / "run")


def test_some_of_the_images_are_learnt_from_always_the_same(tmp_path: Path) -> None:
    spec = small(max_train_images=40, epochs=1)
    train(spec, tmp_path / "run")
    assert last(train(spec, tmp_path / "again")).state["n_images"] == 40
    chosen = [open_images(small(max_train_images=40, seed=seed)).train for seed in (0, 1)]
    whole = open_images(small()).train
    assert len(chosen[0]) == 40 < len(whole)
    assert [int(image.sum()) for image, _ in chosen[0]] == [int(image.sum()) for image, _ in chosen[1]]
