"""Use of a trained run: load its network, and evaluate it alone or in an ensemble."""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.machine import available_cores
from torchcaps.data import Dataset, Loader, Pipeline, SubtractMeanImage, create_pipeline
from torchcaps.models import Network
from torchcaps.training.checkpoint import Checkpoint, check_same_run, read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError
from torchcaps.training.evaluation import Evaluation, RunningEvaluation, batch_loss
from torchcaps.training.limits import build_on_meta, limit_batch_size, max_checkpoint_bytes
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import build_network

__all__ = ["TrainedRun", "correct_images", "evaluate_runs", "load_run"]

MAX_BATCH_PIXELS = 2**25  # pixels times channels of a batch: 128 MiB in float32, 10,000 images of 3x32x32
MAX_IMAGE_PIXELS = 64_000_000  # of the network's input


@dataclass(frozen=True)
class TrainedRun:
    """A trained network with its settings and preprocessing.

    Args:
        path: run directory.
        spec: settings of the run.
        model: the network, in evaluation mode.
        pipeline: preprocessing of its images.
        classes: names of the classes.
        weights: which weights are loaded: ``"last"``, ``"best"`` or ``"ema"``.
        step: number of optimizer steps of these weights.
        note: warning about the checkpoint, such as a damaged newer one; empty if there is none.
        max_batch_size: largest batch size, by the memory of a forward pass; ``None`` if it is not known.

    >>> from torchcaps.training import fit
    >>> images, labels = torch.rand(40, 1, 20, 20), torch.arange(40) % 2
    >>> fitted = fit("capsnet_small", (images, labels), epochs=1, quiet=True, figures=False)
    >>> run = load_run(fitted.path)
    >>> run.classes, run.weights, run.model(images).scores.shape
    (('0', '1'), 'last', torch.Size([40, 2]))
    """

    path: Path
    spec: RunSpec
    model: Network
    pipeline: Pipeline
    classes: tuple[str, ...]
    weights: str
    step: int
    note: str = ""
    max_batch_size: int | None = None

    @property
    def device(self) -> torch.device:
        """Device of the network; the CPU for a network without parameters, such as an ONNX file."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @property
    def batch_size(self) -> int:
        """Number of images per forward pass: that of the run, limited by the memory of a batch of its images."""
        limited = _limit_pixels(self.model, self.spec.recipe.batch_size)
        return limited if self.max_batch_size is None else min(limited, self.max_batch_size)

    @property
    def num_workers(self) -> int:
        """Number of data workers: that of the run, at most one per core."""
        return min(self.spec.num_workers, available_cores())

    def loader(self, dataset: Dataset) -> Loader:
        """Return batches of a data set, preprocessed for this network.

        Raises a ValueError if image shape, classes or number of objects differ from those of the network.
        """
        shape = self.pipeline.output_shape(dataset.shape, train=False)
        if shape != self.model.spec.image:
            expected, got = ("x".join(map(str, s)) for s in (self.model.spec.image, shape))
            raise ValueError(f"{self.path} expects images of shape {expected}, {dataset.name} has {got}")
        if dataset.n_classes != self.model.spec.classes:
            expected, got = self.model.spec.classes, dataset.n_classes
            raise ValueError(f"{self.path} expects {expected} classes, {dataset.name} has {got}")
        if dataset.classes != self.classes:
            names = [", ".join(names[:4]) + ", ..." * (len(names) > 4) for names in (self.classes, dataset.classes)]
            raise ValueError(f"{self.path} expects the classes {names[0]}; {dataset.name} has {names[1]}")
        if dataset.n_objects != self.model.n_objects:
            expected, got = (n or "any number of" for n in (self.model.n_objects, dataset.n_objects))
            raise ValueError(f"{self.path} expects {expected} objects per image, {dataset.name} has {got}")
        options: dict[str, Any] = {"num_workers": self.num_workers, "device": self.device}
        return Loader(dataset, self.batch_size, pipeline=self.pipeline, train=False, **options)


def load_run(
    path: str | os.PathLike[str],
    weights: str | None = None,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> TrainedRun:
    """Load the network of a run. By default, nothing in the directory is executed.

    Args:
        path: run directory.
        weights: ``"last"``, ``"best"`` or ``"ema"`` (default: ``eval_weights`` of the run's recipe).
        device: device of the network, such as ``"cuda"``.
        trust_remote_code: import the model, data set, routing or schedule that the run names, if it is not registered.
            This executes the code of its module; without it, a ValueError names the module.

    >>> from torchcaps.training import fit
    >>> images, labels = torch.rand(40, 1, 20, 20), torch.arange(40) % 2
    >>> fitted = fit("capsnet_small", (images, labels), epochs=1, quiet=True, figures=False)
    >>> load_run(fitted.path).model.spec.classes
    2
    """
    directory = RunDirectory.open(path)
    spec = directory.read_config(trust_remote_code)
    weights = weights or spec.recipe.eval_weights
    try:
        meta = build_on_meta(spec)
    except CheckpointError as error:
        raise CheckpointError(f"{directory.config}: {error}") from error
    checkpoint, note = _read_weights(directory, weights, None if meta is None else max_checkpoint_bytes(meta))
    if weights == "ema" and not checkpoint.section("ema"):
        raise ValueError(f"{path} has no EMA weights: it was trained with --eval-weights {spec.recipe.eval_weights}")
    section = "ema" if weights == "ema" else "model"
    try:
        check_same_run(checkpoint, spec)
        max_batch_size = None
        if meta is not None:
            checkpoint.check_weights(meta, section)  # before memory for the model is allocated
            _check_image_size(meta)
            max_batch_size = limit_batch_size(meta, _limit_pixels(meta, spec.recipe.batch_size))
        model = build_network(spec)
        checkpoint.load_weights(model, section)
        _check_image_size(model)
        step, classes = checkpoint.step, checkpoint.class_names(model.spec.classes)
        pipeline = _load_pipeline(spec, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{directory.best if weights == 'best' else directory.last}: {error}") from error
    notes = [note] if note else []
    network = model.eval().to(device)
    run = TrainedRun(directory.path, spec, network, pipeline, classes, weights, step, "", max_batch_size)
    for name, limited in (("num_workers", run.num_workers), ("batch_size", run.batch_size)):
        value = spec.recipe.batch_size if name == "batch_size" else spec.num_workers
        if limited != value:
            notes.append(f"{name} {value:,} of {directory.config} is limited to {limited:,}")
    return dataclasses.replace(run, note="; ".join(notes))


def _limit_pixels(model: Network, batch_size: int) -> int:
    """Return a batch size whose images have at most `MAX_BATCH_PIXELS`."""
    return max(1, min(batch_size, MAX_BATCH_PIXELS // math.prod(model.spec.image)))


def _check_image_size(model: Network) -> None:
    if math.prod(model.spec.image[1:]) > MAX_IMAGE_PIXELS:
        height, width = model.spec.image[1:]
        raise CheckpointError(f"its images of {height:,}x{width:,} pixels are larger than {MAX_IMAGE_PIXELS:,}")


def _read_weights(directory: RunDirectory, weights: str, max_bytes: int | None) -> tuple[Checkpoint, str]:
    """Return the checkpoint with the given weights, and a note if a newer one is damaged."""
    if weights == "best":
        if not directory.best.exists():
            raise ValueError(
                f"{directory.path} has no best checkpoint, which needs a validation set: train with --val-fraction 0.1"
            )
        return read_checkpoint(directory.best, max_bytes=max_bytes), ""
    checkpoint, problems = directory.newest_checkpoint(max_bytes)
    if checkpoint is None:
        raise CheckpointError(problems[0] if problems else f"{directory.path} has no checkpoint yet")
    return checkpoint, f"{problems[0]}; using the previous checkpoint" if problems else ""


def _load_pipeline(spec: RunSpec, checkpoint: Checkpoint) -> Pipeline:
    """Return the preprocessing of a run, with the mean image of its training set."""
    pipeline = create_pipeline(spec.recipe.augmentation)
    mean = next(iter(checkpoint.section("pipeline").values()), None)
    if mean is not None and not mean.is_floating_point():
        raise CheckpointError(f"its mean image must be floating-point, got {mean.dtype}")
    train, test = (
        [
            dataclasses.replace(s, mean=mean) if isinstance(s, SubtractMeanImage) else s
            for s in pipeline.transforms(train)
        ]
        for train in (True, False)
    )
    return Pipeline(train, test)


def correct_images(run: TrainedRun, dataset: Dataset) -> Tensor:
    """Return whether each image is classified correctly: bool ``[n]``, in the order of the data set."""
    with torch.no_grad():
        correct = [
            run.model.is_correct(run.model(batch.images, batch.labels), batch.labels)
            for batch in run.loader(dataset).epoch(0)
        ]
    return torch.cat(correct).cpu()


def evaluate_runs(runs: list[TrainedRun], dataset: Dataset, progress: Callable[[], object] | None = None) -> Evaluation:
    """Evaluate one run, or an ensemble of several by the mean of their scores.

    Sabour 2017 (CIFAR-10) and Choi 2019 average the lengths of the class capsules. The loss is the members' mean loss.

    Args:
        runs: the members; their losses must be of the same kind, so that their scores can be averaged.
        dataset: the data set.
        progress: called after each batch.
    """
    losses = {run.model.recipe.loss.name for run in runs}
    if len(losses) > 1:
        raise ValueError(
            f"runs of an ensemble must have the same loss, since scores are averaged, got {sorted(losses)}"
        )
    loaders = [run.loader(dataset) for run in runs]
    batch_size = min(loader.batch_size for loader in loaders)
    for loader in loaders:
        loader.batch_size = batch_size
    objectives = [run.model.loss() for run in runs]
    running = RunningEvaluation(runs[0].model)
    with torch.no_grad():
        for batches in zip(*(loader.epoch(0) for loader in loaders), strict=True):
            outputs = [run.model(batch.images, batch.labels) for run, batch in zip(runs, batches, strict=True)]
            device = outputs[0].scores.device  # ONNX files answer on the CPU
            scores = torch.stack([output.scores.to(device) for output in outputs]).mean(0)
            values = [
                float(batch_loss(objective, output, batch, run.step))
                for run, objective, output, batch in zip(runs, objectives, outputs, batches, strict=True)
            ]
            running.update(scores, batches[0].labels, sum(values) / len(values))
            if progress is not None:
                progress()
    return running.compute()
