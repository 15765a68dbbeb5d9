"""The training loop: values of every step against the plain definition, and evaluations of the run."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tolerances import SAME, relative_rms
from tests.training.helpers import (
    assert_bit_equal,
    different_tensors,
    last_checkpoint,
    last_weights,
    saved_spec,
    small_spec,
)
from tests.training.tiny import CHOI, DATA
from torchcaps._core import validation, values
from torchcaps._core.random import step_seed
from torchcaps.data import Loader
from torchcaps.models import LossConfig, OptimizerConfig
from torchcaps.models.schedules import Exponential, Inverse, LRSchedule, Milestones, Product, TimeDecay
from torchcaps.nn import image_dropout
from torchcaps.training import RunSpec, load_run, train, trainer
from torchcaps.training.errors import DivergenceError
from torchcaps.training.evaluation import evaluate
from torchcaps.training.setup import build_network, open_data, open_test_set
from torchcaps.training.trainer import Trainer


def train_plainly(spec: RunSpec, n_steps: int) -> dict[str, torch.Tensor]:
    """The same training as a plain PyTorch loop; returns the weights."""
    images = open_data(spec)
    model = build_network(spec)
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
            with image_dropout(spec.seed, step, batch.indices):
                output = model(batch.images, batch.labels)
            loss(output, batch.labels, batch.targets, step).backward()
            optimizer.step()
            step += 1
        epoch += 1
    return dict(model.state_dict())


SPECS = {
    "margin": lambda: small_spec(),
    "spread": lambda: small_spec(
        routing="em", loss=LossConfig("spread", margin_schedule="linear", margin_steps=5), reconstruction=False
    ),
    "cross-entropy": lambda: small_spec(
        "capsnet_images", data=DATA, channels=(4, 8), types=2, steps=3, augmentation=""
    ),
    "binary": lambda: small_spec(
        "tsai2020_diverse_vector",
        data="diverse-multimnist",
        data_options={"source": "digits"},
        width=8,
        types=2,
        steps=2,
        batch_size=4,
        max_test_images=8,
    ),
    "two targets": lambda: small_spec(
        data="multimnist", data_options={"source": "digits"}, image=(1, 36, 36), n_objects=2, steps=2, max_test_images=8
    ),
    "dropout": lambda: small_spec("choi2019_mnist", model_options=CHOI, val_fraction=0.0, eval_weights="last"),
    "sgd": lambda: small_spec(optimizer=OptimizerConfig("sgd", 0.1, weight_decay=1e-3)),
}


@pytest.mark.parametrize("name", SPECS)
def test_weights_equal_plain_loop(name: str, tmp_path: Path) -> None:
    """Every loss, one and several targets, dropout and augmentation, across the end of an epoch."""
    result = train(SPECS[name](), tmp_path / "run")
    spec = saved_spec(result)
    assert_bit_equal(last_weights(result), train_plainly(spec, spec.recipe.steps or 0))


@pytest.mark.parametrize(
    ("schedule", "factor"),
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
def test_trap_16_24_learning_rate_of_every_step(
    schedule: LRSchedule, factor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int, float]] = []
    clip_gradients = Trainer._clip_gradients

    def record(self: Trainer) -> float:
        steps.append((self.state.step, self.state.epoch, self.optimizer.param_groups[0]["lr"]))
        return clip_gradients(self)

    monkeypatch.setattr(Trainer, "_clip_gradients", record)
    train(small_spec(lr_schedule=schedule, epochs=3, optimizer=OptimizerConfig("adam", 2e-3)), tmp_path / "run")
    # 70 images in batches of 16: five steps per epoch, the last with six images.
    assert [(step, epoch) for step, epoch, _ in steps] == [(step, step // 5) for step in range(15)]
    expected = [2e-3 * factor(step, epoch) for step, epoch, _ in steps]
    assert [lr for _, _, lr in steps] == pytest.approx(expected, rel=1e-12)


def test_epoch_uses_every_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    train_step = Trainer._train_step

    def record(self: Trainer, batch: Any) -> None:
        used.extend(batch.indices.tolist())
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "_train_step", record)
    train(small_spec(epochs=2), tmp_path / "run")
    assert sorted(used[:70]) == sorted(used[70:]) == list(range(70))
    assert used[:70] != used[70:]


def test_micro_batches_have_gradient_of_full_batch(tmp_path: Path) -> None:
    full = last_weights(train(small_spec(steps=5), tmp_path / "full"))
    split = last_weights(train(small_spec(steps=5, micro_batches=3), tmp_path / "split"))
    for name in full:
        assert relative_rms(split[name], full[name]) < SAME[torch.float32], name
    assert different_tensors(full, split) != []  # the sums have another order


def test_micro_batches_do_not_change_dropout(tmp_path: Path) -> None:
    """The mask of an image does not depend on the images next to it; batch norms would."""
    spec = small_spec("sabour2017_cnn_affnist", width=4, features=8, steps=3, test_data="", eval_weights="last")
    assert max(module.p for module in build_network(spec).modules() if isinstance(module, nn.Dropout)) > 0
    full = last_weights(train(spec, tmp_path / "full"))
    split = last_weights(train(dataclasses.replace(spec, micro_batches=3), tmp_path / "split"))
    for name in full:
        assert relative_rms(split[name], full[name]) < SAME[torch.float32], name


def test_max_grad_norm_clips_long_gradients_only(tmp_path: Path) -> None:
    spec = small_spec(steps=1, optimizer=OptimizerConfig("sgd", 1.0, 0.0))
    start = dict(build_network(spec).state_dict())
    norms = {}
    for max_norm in (None, 1e6, 1e-3):
        weights = last_weights(train(dataclasses.replace(spec, max_grad_norm=max_norm), tmp_path / str(max_norm)))
        update = torch.cat([(weights[name] - start[name]).flatten() for name in weights])
        norms[max_norm] = float(update.norm() / spec.recipe.lr_at(0, 0, 1))
    assert norms[None] == norms[1e6] > 0.01
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-2)


def test_ema_weights_are_saved_and_evaluated(tmp_path: Path) -> None:
    constant = TimeDecay(0.0)
    mean = dict(build_network(small_spec()).state_dict())
    for n in range(4):
        weights = last_weights(train(small_spec(steps=n + 1, lr_schedule=constant), tmp_path / f"{n}"))
        d = min(0.9, (1 + n) / (10 + n))
        mean = {name: d * mean[name] + (1 - d) * weights[name] for name in mean}
    result = train(small_spec(steps=4, lr_schedule=constant, eval_weights="ema", ema_decay=0.9), tmp_path / "ema")
    saved = last_checkpoint(result).section("ema")
    for name in mean:
        assert relative_rms(saved[name], mean[name]) < SAME[torch.float32], name
    assert set(result.test_results) == {"last", "ema"}
    assert result.test is result.test_results["ema"]
    assert_bit_equal(dict(load_run(result.path).model.state_dict()), {name: saved[name] for name in mean})


def test_num_workers_and_deterministic_do_not_change_weights(tmp_path: Path) -> None:
    expected = last_weights(train(small_spec(steps=4), tmp_path / "plain"))
    assert_bit_equal(last_weights(train(small_spec(steps=4, num_workers=1), tmp_path / "workers")), expected)
    try:
        assert_bit_equal(last_weights(train(small_spec(steps=4, deterministic=True), tmp_path / "det")), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_precision(tmp_path: Path) -> None:
    full = last_weights(train(small_spec(steps=2), tmp_path / "full"))
    half = last_weights(train(small_spec(steps=2, precision="bf16-mixed"), tmp_path / "half"))
    double = last_weights(train(small_spec(steps=2, precision="64-true"), tmp_path / "double"))
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}
    assert {tensor.dtype for tensor in double.values()} == {torch.float64}
    assert different_tensors(half, full) != []


def test_max_train_images_is_a_fixed_subset(tmp_path: Path) -> None:
    assert last_checkpoint(train(small_spec(max_train_images=40, epochs=1), tmp_path / "run")).state["n_images"] == 40
    subsets = [open_data(small_spec(max_train_images=40, seed=seed)).train for seed in (0, 1)]
    assert [len(subset) for subset in subsets] == [40, 40]
    assert len(open_data(small_spec()).train) > 40
    first, second = ([int(image.sum()) for image, _ in subset] for subset in subsets)
    assert first == second


@pytest.mark.parametrize(
    ("changes", "evaluations"),
    [
        ({"epochs": 2}, ["test", "test"]),
        ({"epochs": 2, "eval_weights": "ema"}, ["test", "test", "test"]),
        ({"epochs": 2, "val_fraction": 0.2}, ["validation", "validation", "test"]),
    ],
    ids=["no validation set", "ema", "validation set"],
)
def test_test_set_is_evaluated_once_per_kind_of_weights(
    changes: dict[str, Any], evaluations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation of the training is not repeated; neither are weights that are the last and the best."""
    splits: list[str] = []
    evaluate_split = Trainer.evaluate

    def record(self: Trainer, loader: Loader) -> Any:
        splits.append(loader.dataset.split)
        return evaluate_split(self, loader)

    monkeypatch.setattr(Trainer, "evaluate", record)
    result = train(small_spec(**changes), tmp_path / "run")
    best_is_last = last_checkpoint(result).state["run"]["best"]["step"] in (0, result.steps)
    assert splits == evaluations + ([] if best_is_last else ["test"])
    expected = {kind: evaluate_again(result.path, kind) for kind in result.test_results}
    assert result.test_results == expected


def evaluate_again(path: Path, kind: str) -> Any:
    run = load_run(path, kind)
    dataset = open_test_set(run.spec)
    assert dataset is not None
    return evaluate(run.model, run.loader(dataset), run.model.loss(), run.step)


def test_result_has_correctness_of_every_test_image(tmp_path: Path) -> None:
    result = train(small_spec(), tmp_path / "run")
    assert result.correct is not None
    assert result.test is not None
    assert result.correct.shape == (30,)
    assert int(result.correct.sum()) == round(result.test.accuracy * 30)
    run = load_run(result.path)
    images = open_data(run.spec)
    assert images.test is not None
    batches = list(run.loader(images.test).epoch(0))
    expected = torch.cat([run.model.is_correct(run.model(batch.images), batch.labels) for batch in batches])
    assert result.correct.tolist() == expected.tolist()


class CountWaits(TorchDispatchMode):
    """Count the operations that wait for an accelerator: reads of a value, results whose size depends on values."""

    waiting: ClassVar = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    }

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.waiting:
            self.waits.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["margin", "spread", "cross-entropy", "binary", "two targets", "dropout"])
def test_a_step_on_an_accelerator_waits_once(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the CPU treated as an accelerator: checks, scores, labels, loss and gradient norm are copied together.

    After this copy, the host works on its own copies of scores and labels.
    """
    train_step, copy = Trainer._train_step, values.copy_to_host
    copies, waits = [], []

    def counted_step(self: Trainer, batch: Any) -> None:
        count = CountWaits()

        def stop_counting(tensor: torch.Tensor) -> torch.Tensor:
            waits.extend(count.waits)
            copies.append(tensor.numel())
            return copy(tensor)

        with count, monkeypatch.context() as context:
            context.setattr(values, "copy_to_host", stop_counting)
            train_step(self, batch)

    for module in (values, validation):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(trainer, "step_seed", lambda *_: 0)  # computed with tensors that are always on the host
    monkeypatch.setattr(Trainer, "_train_step", counted_step)
    spec = dataclasses.replace(SPECS[name](), max_grad_norm=1.0)
    train(spec, tmp_path / "run")
    assert (len(copies), waits) == (spec.recipe.steps, [])


def test_a_step_on_an_accelerator_names_what_is_not_finite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checks that are read together lead to the same diagnosis, before the weights are changed."""
    for module in (values, validation):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    train_step = Trainer._train_step

    def damaged_step(self: Trainer, batch: Any) -> None:
        with torch.no_grad():
            next(self.network.parameters())[0] = torch.nan
        before = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        try:
            train_step(self, batch)
        finally:
            assert_bit_equal({name: p.detach() for name, p in self.network.named_parameters()}, before)

    monkeypatch.setattr(Trainer, "_train_step", damaged_step)
    with pytest.raises(DivergenceError, match="weight"):
        train(small_spec(), tmp_path / "run")
