"""`torchcaps.fit`: every form of data and model, the same results as the engine, and errors before training."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import torchcaps
from tests.data.helpers import write_image
from tests.tolerances import assert_equal
from torchcaps.data import Digits, Loader, create_dataset
from torchcaps.data.own import (
    DataLoaderBatches,
    DataLoaderImages,
    TensorImages,
    TorchImages,
    as_dataset,
    class_names_of,
)
from torchcaps.data.pipelines import create_pipeline
from torchcaps.models import OptimizerConfig, Sabour2017
from torchcaps.training import FittedRun, RunSpec, StopReason, train
from torchcaps.training.fit_settings import SYNONYMS, settings_of_model

SMALL: dict[str, Any] = {"width": 8, "types": 2, "hidden": (8,)}
QUICK: dict[str, Any] = {"batch_size": 8, "quiet": True, "figures": False, "num_threads": 1, "device": "cpu"}
X = torch.rand(24, 1, 20, 20, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


class Pairs(TorchDataset):
    """A map-style data set without known labels."""

    def __init__(self, images: torch.Tensor = X, labels: Any = Y) -> None:
        self.images, self.values = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.values[index]


def fit(data: Any = (X, Y), tmp_path: Path | None = None, **settings: Any) -> FittedRun:
    settings = {"steps": 3, **QUICK, **SMALL, **settings}
    if isinstance(data, DataLoader):
        del settings["batch_size"]
    out = None if tmp_path is None else tmp_path / "run"
    return torchcaps.fit("capsnet_small", data, out=out, **settings)


def test_forms_of_data_give_the_same_weights(tmp_path: Path) -> None:
    """Tensors and data sets are ordered by the engine; bytes are scaled; a DataLoader in the same order is equal."""
    forms: dict[str, Any] = {
        "tensors": (X, Y),
        "arrays": (X.numpy(), Y.numpy()),
        "tensor data set": TensorDataset(X, Y),
        "data set": Pairs(),
        "subset": Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(24)),
    }
    for form in forms.values():
        batch = as_dataset(form, "train", "abc").get_batch(torch.tensor([2, 11]))
        assert_equal(batch.images, X[[2, 11]])
        assert_equal(batch.labels, Y[[2, 11]])
        assert class_names_of(form, "train") == ("0", "1", "2")
    by_items = fit(Pairs(), tmp_path / "items", val_fraction=0)
    order = [Loader(TensorImages(X, Y, "abc"), 8).indices(0, n) for n in range(3)]
    loader = DataLoader(Pairs(X[torch.cat(order)], Y[torch.cat(order)]), batch_size=8)
    plain = fit(tmp_path=tmp_path / "plain", val_fraction=0)
    with pytest.warns(UserWarning, match="bit-exact"):
        run = fit(loader, tmp_path / "loader")
    for key, tensor in plain.network.state_dict().items():
        assert_equal(run.network.state_dict()[key], tensor)
        assert_equal(by_items.network.state_dict()[key], tensor)


def test_fit_equals_the_engine_of_the_command_line(tmp_path: Path) -> None:
    settings = {"max_train_images": 40, "max_test_images": 20, "seed": 3}
    run = fit("digits", tmp_path, **settings, lr=0.01, optimizer="sgd", lr_schedule="constant")
    spec = RunSpec.of("capsnet_small", **SMALL, **settings, steps=3, batch_size=8, device="cpu", num_threads=1)
    recipe = dataclasses.replace(spec.recipe, optimizer=OptimizerConfig("sgd", 0.01, **_kept(spec)))
    spec = dataclasses.replace(spec, recipe=recipe).replace_recipe(lr_schedule=torchcaps.models.schedules.Constant())
    result = train(spec, tmp_path / "engine", figures=False)
    assert result.test is not None
    assert run.test is not None
    assert (run.test.n_correct, run.test.loss) == (result.test.n_correct, result.test.loss)
    assert run.spec.recipe.data == "digits"
    by_spec = fit(Digits(), tmp_path / "spec", **settings, lr=0.01, optimizer="sgd", lr_schedule="constant")
    assert by_spec.test == run.test


def _kept(spec: RunSpec) -> dict[str, Any]:
    optimizer = spec.recipe.optimizer
    return {"momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay, "eps": optimizer.eps}


@pytest.mark.usefixtures("figures")
def test_result_has_history_best_epoch_and_files(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    run = fit(
        ((255 * X).byte(), Y),
        tmp_path,
        val=(X[:6], Y[:6]),
        test=DataLoader(TensorDataset(X, Y), 5),
        steps=None,
        epochs=2,
        class_names=["a", "b", "c"],
        figures=True,
    )
    assert_equal(torch.random.get_rng_state(), state)
    assert run.history["epoch"] == [1.0, 2.0]
    accuracies = run.history["val_accuracy"]
    assert run.best_epoch in (1.0, 2.0)
    assert accuracies[int(run.best_epoch) - 1] == max(accuracies)  # type: ignore[type-var]
    assert run.result.stop_reason is StopReason.MAX_EPOCHS
    assert run.classes == ("a", "b", "c")
    assert run.test is not None
    assert run.test.n == 24
    again = run.evaluate((X, Y))
    assert (again.n_correct, again.confusion) == (run.test.n_correct, run.test.confusion)
    loaded = torchcaps.load_run(run.path)
    assert loaded.classes == run.classes
    for key, tensor in run.network.state_dict().items():
        assert_equal(tensor, loaded.model.state_dict()[key])
    assert {path.stem for path in (run.path / "figures").iterdir()} >= {"curves", "confusion"}


def test_network_is_trained_in_place_from_its_weights(tmp_path: Path) -> None:
    network = torchcaps.create_model("capsnet_small", image=(1, 20, 20), classes=3, **SMALL)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    run = torchcaps.fit(network, (X, Y), out=tmp_path / "run", steps=1, **{**QUICK, "batch_size": 24}, lr=1e-12)
    assert run.network is network
    assert not network.training
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=1e-6)
    spec = Sabour2017(image=(1, 20, 20), classes=3, **SMALL)
    assert settings_of_model(spec, {})[0].model_spec() == spec
    run = torchcaps.fit(spec, (X, Y), val=(X, Y), out=tmp_path / "spec", **QUICK, steps=1)
    assert run.network.spec == spec
    with pytest.raises(ValueError, match=r"class indices in 0\.\.2, got 3"):
        torchcaps.fit(network, (X, Y + 1), **QUICK)


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_resume(kind: str, tmp_path: Path) -> None:
    """Bit-exact for tensors; a DataLoader continues as well."""
    data: Any = (X, Y) if kind == "tensors" else DataLoader(TensorDataset(X, Y), 8, shuffle=True)
    context = pytest.warns(UserWarning, match="DataLoader") if kind == "loader" else pytest.MonkeyPatch.context()
    with context:
        fit(data, tmp_path, steps=2, lr_schedule="constant")
        resumed = torchcaps.fit("capsnet_small", data, resume=tmp_path / "run", steps=5, quiet=True, figures=False)
        assert resumed.result.steps == 5
        if kind == "tensors":
            straight = fit(data, tmp_path / "straight", steps=5, lr_schedule="constant")
            for key, tensor in resumed.network.state_dict().items():
                assert_equal(tensor, straight.network.state_dict()[key])
    with pytest.raises(ValueError, match="'lr' can't be changed on resume"):
        torchcaps.fit("capsnet_small", data, resume=tmp_path / "run", lr=1)


@dataclass(frozen=True, kw_only=True)
class OwnSpec(Sabour2017):
    """A model that is not registered."""

    width: int = 8
    types: int = 2
    hidden: tuple[int, ...] = (8,)


def test_own_models_can_be_resumed_without_trust(tmp_path: Path) -> None:
    """The caller passes the model, so that only other code in the run directory needs ``trust_remote_code``."""
    spec = OwnSpec(image=(1, 20, 20), classes=3)
    torchcaps.fit(spec, (X, Y), out=tmp_path / "run", steps=1, **QUICK)
    run = torchcaps.fit(spec, (X, Y), resume=tmp_path / "run", steps=2, quiet=True, figures=False)
    assert run.result.steps == 2
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        torchcaps.fit("capsnet_small", (X, Y), resume=tmp_path / "run", steps=3, quiet=True)


INVALID: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no channel": ((X[:, 0], Y), {}, ValueError, r"\[N, C, H, W\], got \[24, 20, 20\]: .*unsqueeze"),
    "channels last": ((X.permute(0, 2, 3, 1), Y), {}, ValueError, r"channels first"),
    "image dtype": ((X.long(), Y), {}, TypeError, r"uint8 or floating-point, got torch.int64"),
    "bytes as floats": ((255 * X, Y), {}, ValueError, r"0\.\.1 .* divide them by 255"),
    "NaN": ((X * torch.nan, Y), {}, ValueError, r"finite"),
    "label dtype": ((X, Y.float()), {}, TypeError, r"train labels must be integers .*float32"),
    "one-hot": ((X, torch.eye(3)[Y]), {}, ValueError, r"argmax"),
    "label count": ((X, Y[:5]), {}, ValueError, r"each of 24 images, got \[5\]"),
    "negative label": ((X, Y - 1), {}, ValueError, r"got -1"),
    "label above classes": ((X, Y), {"classes": 2}, ValueError, r"0\.\.1, got 2"),
    "label of validation": ((X, Y), {"val": (X, Y + 1)}, ValueError, r"val labels .*0\.\.2, got 3"),
    "shape of test": ((X, Y), {"test": (X[..., 1:], Y)}, ValueError, r"test must have the shape .*\[1, 20, 20\]"),
    "empty": ((X[:0], Y[:0]), {}, ValueError, r"at least one image"),
    "empty data set": (Pairs(X[:0], Y[:0]), {}, ValueError, r"at least one image, got an empty Pairs"),
    "not data": (X, {}, TypeError, r"train must be tensors \(images, labels\), .* got a tensor"),
    "items": (Pairs(X, ["a"] * 24), {}, TypeError, r"item 0 .*int as label, got str"),
    "no images": (Pairs(list("ab"), Y), {}, TypeError, r"item 0 .*got tuple of str, Tensor"),  # type: ignore[arg-type]
    "class of data": (Digits, {}, TypeError, r"Digits\(\)"),
    "synonym": ((X, Y), {"learning_rate": 1}, ValueError, r"did you mean 'lr'"),
    "typing error": ((X, Y), {"epoch": 1}, ValueError, r"did you mean 'epochs'"),
    "value": ((X, Y), {"lr": -1}, ValueError, r"lr must be greater than 0, got -1"),
    "field of the optimizer": ((X, Y), {"optimizer": torch.optim.Adam}, ValueError, r"^optimizer must be 'adam'"),
    "type of a value": ((X, Y), {"lr": "fast"}, TypeError, r"^lr must be a number, got 'fast'"),
    "index of a device": ((X, Y), {"device": torch.device("cuda:1")}, ValueError, r"CUDA_VISIBLE_DEVICES"),
    "no device": ((X, Y), {"device": "gpu:0"}, ValueError, r"^device must be 'auto', 'cpu', .* got 'gpu:0'"),
    "index of a device by name": ((X, Y), {"device": "cuda:1"}, ValueError, r"CUDA_VISIBLE_DEVICES"),
    "engine's flag": ((X, Y), {"early_stopping_patience": 1, "val_fraction": 0}, ValueError, r"use val_fraction=0\.1"),
    "schedule": ((X, Y), {"lr_schedule": "onecycle"}, ValueError, r"'one_cycle'"),
    "split of a loader": (DataLoader(Pairs(), 8), {"val_fraction": 0.1}, ValueError, r"pass val="),
    "batches": (DataLoader([X[0], X[1]]), {}, TypeError, r"batch 0 .*pair of tensors"),  # type: ignore[arg-type]
    "devices": ((X, Y), {"devices": 2}, ValueError, r"torchrun"),
    "class names": ((X, Y), {"class_names": "abc"}, TypeError, r"list of strings"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input_is_rejected_before_training(name: str, tmp_path: Path) -> None:
    data, settings, error, pattern = INVALID[name]
    with pytest.raises(error, match=pattern) as raised:
        fit(data, tmp_path, **settings)
    assert type(raised.value) in (error, *error.__subclasses__())
    assert "\n" not in str(raised.value)
    assert "--" not in str(raised.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_torch_devices_and_images_with_gradients(tmp_path: Path) -> None:
    images = X.clone().requires_grad_() * 1  # part of a graph, which two steps can't share
    expected = fit((X, Y), tmp_path / "plain", steps=2).history["train_loss"]
    settings = {"steps": 2, "optimizer": "Adam"}
    for device in (torch.device("cpu"), "cpu:0"):
        run = fit((images, Y), tmp_path / str(device).replace(":", ""), device=device, **settings)
        assert run.history["train_loss"] == expected


def test_unavailable_device_is_reported_before_data_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torchcaps.training.fitting.open_data", lambda spec: pytest.fail("the data was opened"))
    with pytest.raises(ValueError, match="device=cuda is not available"):
        torchcaps.fit("capsnet_small", "digits", device="cuda:0")


def test_models_that_are_rejected() -> None:
    with pytest.raises(TypeError, match="subclassing"):
        torchcaps.fit(torch.nn.Linear(2, 2), (X, Y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capsnet_small"):
        torchcaps.fit("capsnet_smal", (X, Y))
    with pytest.raises(ValueError, match="pass val=, or eval_weights='last'"):
        torchcaps.fit("choi2019_mnist", DataLoader(TensorDataset(X, Y), 8))


def test_iterable_data_sets_are_rejected() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(X, Y, strict=True)

    for data in (Stream(), DataLoader(Stream(), 4)):
        with pytest.raises(TypeError, match="length"):
            torchcaps.fit("capsnet_small", data)


def test_synonyms_name_settings() -> None:
    known = {f.name for f in dataclasses.fields(RunSpec)} | {f.name for f in dataclasses.fields(OptimizerConfig)}
    known |= {f.name for f in dataclasses.fields(RunSpec().recipe)} | {"classes", "quiet", "out", "val"}
    assert set(SYNONYMS.values()) <= known


def test_own_data_sets_check_later_items() -> None:
    labels = [0, 1, 5]
    dataset = TorchImages(Pairs(X[:3], labels), "abc")
    with pytest.raises(ValueError, match=r"item 2 .* label in 0\.\.2, got 5"):
        dataset.get_batch(torch.arange(3))
    images = [X[0], X[1, :, 1:], X[2]]
    dataset = TorchImages(Pairs(images, [0, 1, 2]), "abc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"item 1 .*\[1, 19, 20\]"):
        dataset.get_batch(torch.arange(3))
    assert len(dataset.get_batch(torch.arange(0)).images) == 0


def test_batches_of_a_data_loader() -> None:
    images = DataLoaderImages(DataLoader(TensorDataset(X, Y), 10, drop_last=True), "abc")
    batches = DataLoaderBatches(images, create_pipeline(""), train=True)
    assert (len(images), len(batches), batches.batches_per_epoch) == (20, 2, 2)
    (last,) = batches.epoch(0, start=1)
    assert_equal(last.images, X[10:20])
    assert last.indices.tolist() == list(range(10, 20))
    subset = images.subset([15, 3])
    assert_equal(subset.images, X[[15, 3]])
    assert_equal(subset.labels, Y[[15, 3]])
    ours = create_dataset("digits", "test")
    assert as_dataset(ours, "test", ()) is ours


def test_directories_of_images_get_size_and_classes_of_the_training_data(tmp_path: Path) -> None:
    """All images of a test directory without splits are used, as on the command line."""
    for n in range(12):
        write_image(tmp_path / "pics" / "abc"[n % 3] / f"{n}.png", (20, 20), seed=n)
        write_image(tmp_path / "more" / "cb"[n % 2] / f"{n}.png", (30, 40), seed=n)
    images = create_dataset(str(tmp_path / "pics"), "train")
    for form, data in {"name": str(tmp_path / "pics"), "data set": images}.items():
        run = fit(data, tmp_path / form, test=tmp_path / "more", val_fraction=0.1)
        assert run.test is not None
        assert run.test.class_counts == [0, 6, 6]
        assert run.evaluate(str(tmp_path / "more")).class_counts == [0, 6, 6]
