"""`fit`: train a model on data of your own, or on a data set of torchcaps, with the engine of ``torchcaps train``."""

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchcaps._core.validation import FieldError, FieldTypeError
from torchcaps.data import Dataset, DataSpec, LoadRequest, create_dataset
from torchcaps.data.own import DataLoaderImages, as_dataset, check_not_empty, class_names_of
from torchcaps.data.registry import DATASETS, is_image_folder
from torchcaps.models import ModelSpec, Network
from torchcaps.models.recipe import LossConfig, OptimizerConfig
from torchcaps.training.config import RunSpec
from torchcaps.training.distributed import check_device, num_processes
from torchcaps.training.evaluation import Evaluation, evaluate
from torchcaps.training.figures import best_row
from torchcaps.training.fit_settings import recorded_settings, settings_of_model
from torchcaps.training.inference import load_run
from torchcaps.training.logging import COLUMNS, ConsoleLogger, read_metrics
from torchcaps.training.prediction import unprocessed_shape
from torchcaps.training.run import resume, train
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import (
    RunData,
    build_loader,
    folder_options,
    is_other_folder,
    limit_images,
    open_data,
    open_folder,
    prepare_data,
)
from torchcaps.training.state import TrainResult

__all__ = ["FittedRun", "fit"]

FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:(?: |=)(\d[\w.]*|'[^']*'|best|last|ema|auto|cpu|cuda|mps)(?=[\s,;:.]|$))?")


@dataclass(frozen=True)
class FittedRun:
    """Result of `fit`.

    Args:
        path: the run directory, which `torchcaps.load_run` and the commands of torchcaps accept.
        network: the trained network in evaluation mode, with the weights that the recipe evaluates.
        spec: all settings.
        classes: names of the classes.
        history: metrics of every evaluation by column: ``epoch``, ``step``, ``seconds``, ``lr``, ``train_loss``,
            ``train_accuracy``, ``val_loss``, ``val_accuracy``, ``test_loss``, ``test_accuracy``, ``grad_norm``;
            ``None`` in a row without that value.
        best_epoch: epoch with the highest validation accuracy; ``None`` without a validation set.
        result: stop reason, duration and evaluations on the test set.

    >>> import tempfile
    >>> images, labels = torch.rand(40, 1, 20, 20), torch.arange(40) % 2
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = fit("capsnet_small", (images, labels), epochs=1, batch_size=20, out=out, quiet=True, figures=False)
    >>> run.classes, run.best_epoch, run.network.predict(run.network(images[:4])).shape
    (('0', '1'), 1.0, torch.Size([4]))
    """

    path: Path
    network: Network = dataclasses.field(repr=False)
    spec: RunSpec = dataclasses.field(repr=False)
    classes: tuple[str, ...]
    history: Mapping[str, list[float | None]] = dataclasses.field(repr=False)
    best_epoch: float | None
    result: TrainResult = dataclasses.field(repr=False)

    @property
    def test(self) -> Evaluation | None:
        """Evaluation of ``network`` on the test set; ``None`` without one."""
        return self.result.test

    def evaluate(self, data: Any) -> Evaluation:
        """Evaluate the network on other data, in any form that `fit` accepts."""
        run = load_run(self.path, trust_remote_code=True)
        shape = unprocessed_shape(run) if is_image_folder(data) else None
        dataset = _open(data, "test", self.spec, self.classes, shape)
        loader = build_loader(dataset, self.spec, run.pipeline, False)
        return evaluate(run.model, loader, run.model.loss(), run.step)


def fit(model: str | ModelSpec | Network, train: Any, val: Any = None, test: Any = None, **settings: Any) -> FittedRun:
    """Train a model; the engine, the files and the results are those of ``torchcaps train``.

    Args:
        model: name of a model (`torchcaps.list_models`), a spec such as ``Sabour2017(...)``, or a network, which is
            trained in place. Image size and classes of a model given by name follow the data.
        train: training data: tensors ``(images, labels)``, a torch ``Dataset`` of such pairs, a ``DataLoader`` of such
            batches, or a data set of torchcaps: a name, a directory of images, a spec or the result of
            `torchcaps.create_dataset`. Images ``[N, C, H, W]`` are uint8 (scaled to 0..1) or floats (used as they are);
            labels are class indices ``[N]``. A run on a ``DataLoader`` can be resumed, but not bit-exactly.
        val: validation data. Default: the recipe's ``val_fraction`` of the training data, none of a ``DataLoader``.
        test: test data, evaluated after training. Default: for a data set by name its test split, otherwise none.
        settings: any flag of ``torchcaps train`` under its name: ``epochs``, ``lr``, ``batch_size``, ``device``,
            ``seed``, ``optimizer="sgd"``, ``lr_schedule="one_cycle"``, ``max_minutes``, fields of the model such as
            ``routing``. Default: the model's recipe, but no augmentation of your own data. Further: ``out``, the run
            directory; ``resume``, a run directory to continue (with ``epochs`` or ``steps``), which may name code of
            others with ``trust_remote_code=True`` only; ``figures=False``; ``quiet=True``; ``class_names``.

    >>> import tempfile
    >>> images, labels = torch.rand(40, 1, 20, 20), torch.arange(40) % 2
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = fit("capsnet_small", (images, labels), epochs=1, batch_size=20, out=out, quiet=True, figures=False)
    >>> run.network.spec.classes, len(run.history["train_loss"])
    (2, 1)
    """
    with _errors_with_setting_names(), _restored_torch_state():
        device = settings.get("device")
        if isinstance(device, torch.device) or (isinstance(device, str) and ":" in device):
            settings = {**settings, "device": _device_type(device)}
        spec, network, fixed = settings_of_model(model, settings)
        if settings.get("resume") is not None:
            named = {"data": train, "test_data": test}
            own = {key: _name_of(value)[0] for key, value in named.items() if isinstance(value, str | DataSpec)}
            spec, settings = recorded_settings(settings, {"model": spec.model, **own})
        check_device(spec.device, spec.devices)  # before data is opened, which may take long
        spec, data = _data_run(spec, network, train, val, test, settings)
        if isinstance(network, Network) and network.spec.classes != data.train.n_classes:
            raise ValueError(
                f"train must have the {network.spec.classes} classes of the network, got {data.train.n_classes}"
            )
        _check_pixels(spec, data)
        if spec.devices != 1 and num_processes() == 1:
            raise ValueError(
                f"devices must be 1 in Python, got {spec.devices}: start the script with torchrun, or train on the "
                "command line"
            )
        console = ConsoleLogger(False) if settings.get("quiet") else None
        options: dict[str, Any] = {"console": console, "figures": settings.get("figures", True), "data": data}
        if isinstance(data.train, DataLoaderImages):
            warnings.warn(
                "the order of a DataLoader is not known to torchcaps, so a resumed run will not be bit-exact: pass its "
                "data set for exact resume",
                stacklevel=2,
            )
        if settings.get("resume") is not None:
            length = {name: settings[name] for name in ("epochs", "steps") if name in settings}
            options |= {"network": network, "trust_remote_code": True}  # checked by `recorded_settings`
            result = resume(settings["resume"], lambda old: old.replace_recipe(**length), **options)
        else:
            result = _train(spec, settings.get("out"), fixed, network=network, **options)
    return _load_fitted(result, network, data.train.classes)


def _device_type(name: torch.device | str) -> str:
    """Return the type of a torch device, for the setting ``device``; raise a ValueError if it is not the first one."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return str(name)  # rejected with the accepted types, as any other name
    if device.index:
        raise ValueError(
            f"device must be a device type such as {device.type!r}, got {device}: select one by CUDA_VISIBLE_DEVICES"
        )
    return device.type


_train = train  # `fit` has an argument of this name


def _load_fitted(result: TrainResult, network: Network | None, classes: tuple[str, ...]) -> FittedRun:
    """Return the run with its trained network and metrics."""
    run = load_run(result.path, trust_remote_code=True)
    if network is None:
        network = run.model
    else:
        network.load_state_dict(run.model.state_dict())
    directory = RunDirectory(result.path)
    rows = read_metrics(directory.metrics)
    history = {column: [row[column] for row in rows] for column in COLUMNS}
    best = best_row(rows)
    epoch = None if best is None else best["epoch"]
    return FittedRun(result.path, network.eval(), run.spec, classes, history, epoch, result)


# Data ---------------------------------------------------------------------------------------------------------------


def _data_run(
    spec: RunSpec, network: Network | None, train: Any, val: Any, test: Any, settings: Mapping[str, Any]
) -> tuple[RunSpec, RunData]:
    """Return the settings with those of the data, and the data."""
    for split, value in (("train", train), ("val", val), ("test", test)):
        if isinstance(value, type):
            raise TypeError(
                f"{split} must be data, got the class {value.__name__}: use an instance, {value.__name__}()"
            )
    changes: dict[str, Any] = {"data": "", "test_data": ""}
    is_named = isinstance(train, str | os.PathLike | DataSpec)
    if is_named and val is None and (test is None or isinstance(test, str | os.PathLike)):
        data, options = _name_of(train)
        changes |= {"data": data, "test_data": "" if test is None else _name_of(test)[0]}
        spec = dataclasses.replace(spec.replace_recipe(**changes), data_options={**options, **spec.data_options})
        return spec, open_data(spec)
    is_ours = is_named or isinstance(train, Dataset)
    if not is_ours and "augmentation" not in settings:
        changes["augmentation"] = ""
    if val is not None or (isinstance(train, DataLoader) and "val_fraction" not in settings):
        changes["val_fraction"] = 0.0
    if isinstance(train, DataLoader):
        if settings.get("val_fraction"):
            raise ValueError("val_fraction can't be split from a DataLoader: pass val=, or the data set of the loader")
        if "batch_size" in settings:
            raise ValueError(
                f"batch_size of a DataLoader is its own, {train.batch_size}, got {settings['batch_size']}: omit it"
            )
    if val is None and not changes.get("val_fraction", spec.recipe.val_fraction) and spec.recipe.eval_weights == "best":
        raise ValueError(
            f"{spec.model} evaluates the weights with the best validation accuracy: pass val=, or eval_weights='last'"
        )
    if spec.data_options or spec.test_options:
        raise ValueError("data_options and test_options are for data sets by name only")
    spec = spec.replace_recipe(**changes)
    classes = _classes(spec, network, train, settings)
    opened = {"train": _open(train, "train", spec, classes)}
    for split, value in (("val", val), ("test", test)):
        if value is not None:
            opened[split] = _open(value, split, spec, opened["train"].classes, opened["train"].shape)
            if opened[split].shape != opened["train"].shape:
                expected, got = (list(opened[name].shape) for name in ("train", split))
                raise ValueError(f"images of {split} must have the shape of the training images, {expected}, got {got}")
    if isinstance(opened["train"], DataLoaderImages):
        spec = spec.replace_recipe(batch_size=opened["train"].batch_size)
    test_set = limit_images(opened["test"], spec.max_test_images) if "test" in opened else None
    return spec, prepare_data(spec, opened["train"], opened.get("val"), test_set)


def _classes(spec: RunSpec, network: Network | None, train: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes: those given, those of the data, or indices."""
    names = settings.get("class_names")
    if names is not None:
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"class_names must be a list of strings, got {names!r}")
        return tuple(names)
    if isinstance(train, str | os.PathLike | DataSpec):
        return ()  # the data set has its own
    n_classes = network.spec.classes if network is not None else spec.model_options.get("classes")
    return class_names_of(train, "train", n_classes)


def _open(
    value: Any, split: str, spec: RunSpec, classes: tuple[str, ...], shape: tuple[int, int, int] | None = None
) -> Dataset:
    """Return data in any form as a data set.

    Args:
        value: the data.
        split: name of the split.
        spec: settings of the run.
        classes: names of the classes; empty if the data defines them.
        shape: shape of the training images, which other directories of images get.
    """
    source = "train" if split == "train" else "test"
    if shape is not None and is_other_folder(value, spec.recipe.data):
        dataset = open_folder(value, None, folder_options(spec, shape, classes))
    elif isinstance(value, str | os.PathLike):
        root = None if is_image_folder(value) else spec.data_dir
        dataset = create_dataset(os.fspath(value), source, root)
    elif isinstance(value, DataSpec):
        dataset = value.load(LoadRequest(type(value).__name__, source, spec.data_dir))
    else:
        if not isinstance(value, Dataset):
            check_not_empty(value, split)
        dataset = as_dataset(value, split, classes)
    if not len(dataset):
        raise ValueError(f"{split} must contain at least one image, got none")
    if classes and dataset.n_classes != len(classes):
        raise ValueError(f"{split} must have {len(classes)} classes like the training data, got {dataset.n_classes}")
    return dataset


def _name_of(value: str | os.PathLike[str] | DataSpec) -> tuple[str, dict[str, Any]]:
    """Return name and options of a data set by name, directory or spec."""
    if isinstance(value, DataSpec):
        names = [name for name in DATASETS if type(DATASETS.get(name)) is type(value)]
        if not names:
            path = f"{type(value).__module__}.{type(value).__qualname__}"
            return path, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        default = DATASETS.get(names[0])
        fields = [f.name for f in dataclasses.fields(value)]
        return names[0], {f: getattr(value, f) for f in fields if getattr(value, f) != getattr(default, f)}
    if is_image_folder(value):
        return str(Path(value).expanduser().resolve()), {}
    return os.fspath(value), {}


def _check_pixels(spec: RunSpec, data: RunData) -> None:
    """Raise if a decoder would have to reconstruct images outside of 0..1, such as bytes that were cast to floats."""
    if not getattr(spec.model_spec(), "reconstruction", False):
        return
    if isinstance(data.train, DataLoaderImages):
        images = next(data.train.batches()).images
    else:
        images = data.train.get_batch(torch.arange(min(64, len(data.train)))).images
    low, high = (float(value) for value in torch.aminmax(images.float()))
    if images.is_floating_point() and (low < 0 or high > 1):
        hint = "divide them by 255" if high > 2 and low >= 0 else "scale them"
        raise ValueError(
            f"images must be in 0..1 since {spec.model} reconstructs them, got {low:.3g} to {high:.3g}: {hint}, or use "
            "reconstruction=False"
        )


# Context ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors_with_setting_names() -> Iterator[None]:
    """Write flags in messages of the engine as settings: ``--val-fraction 0.1`` becomes ``val_fraction=0.1``."""
    try:
        yield
    except (FieldError, FieldTypeError) as error:
        owners = {OptimizerConfig.__name__: "optimizer", LossConfig.__name__: "loss"}
        name = owners.get(error.owner, error.field) if error.field == "name" else error.field
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name} {error.problem}") from error
    except (ValueError, RuntimeError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str) and "torchcaps train" not in error.args[0]:
            error.args = (FLAG.sub(lambda m: f"{m[1].replace('-', '_')}={m[2] or ''}", error.args[0]),)
        raise


@contextlib.contextmanager
def _restored_torch_state() -> Iterator[None]:
    """Restore the random state and the number of threads, which training sets."""
    n_threads = torch.get_num_threads()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads(n_threads)
