"""Use of a trained run: load its network, evaluate it alone or in an ensemble, and classify image files."""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchcaps._core.machine import available_cores
from torchcaps._core.optional import import_optional
from torchcaps.data import Batch, DataError, Dataset, Loader, Pipeline, SubtractMeanImage, create_pipeline
from torchcaps.data.images import MAX_MEGAPIXELS, PILLOW_MEGAPIXELS, ImageFormat, center_ink, read_image
from torchcaps.data.registry import is_image_folder
from torchcaps.models import Network
from torchcaps.training.checkpoint import Checkpoint, check_model_size, check_same_run, read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError
from torchcaps.training.evaluation import Evaluation, RunningEvaluation, batch_loss
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import build_network

__all__ = [
    "Prediction",
    "TrainedRun",
    "correct_images",
    "evaluate_runs",
    "load_image",
    "load_run",
    "predict",
    "unprocessed_shape",
]

Polarity = Literal["auto", "as-is", "inverted"]
Fit = Literal["crop", "pad", "stretch"]
MAX_BATCH_PIXELS = 2**25  # pixels times channels of a batch: 128 MiB in float32, 10,000 images of 3x32x32
MAX_IMAGE_PIXELS = 64_000_000  # of the network's input
FRAME_FRACTION = 0.08  # width of the frame whose brightness tells paper from ink, of the shorter side
PAPER_BRIGHTNESS = 0.6  # mean brightness of the frame above which it is paper
MIN_CONFIDENT_SCORE = 0.5
INK_SCALE = 10  # resolution at which ink is located, relative to the network's input
CENTERED_DIGITS = ("digits", "mnist", "expanded-mnist", "affnist-style")  # data sets of bright digits on black
OVERLAPPING_DIGITS = ("multimnist", "multimnist-official", "diverse-multimnist")
SIZE_CHANGES = (0, 8, -12, 16, 4, -4, -8, 12, 24)  # by which the papers' pipelines crop or pad, in pixels


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
    """

    path: Path
    spec: RunSpec
    model: Network
    pipeline: Pipeline
    classes: tuple[str, ...]
    weights: str
    step: int
    note: str = ""

    @property
    def batch_size(self) -> int:
        """Number of images per forward pass: that of the run, limited by the memory of a batch of its images."""
        return max(1, min(self.spec.recipe.batch_size, MAX_BATCH_PIXELS // math.prod(self.model.spec.image)))

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
        return Loader(dataset, self.batch_size, pipeline=self.pipeline, train=False, num_workers=self.num_workers)


def load_run(
    path: str | os.PathLike[str], weights: str | None = None, *, trust_remote_code: bool = False
) -> TrainedRun:
    """Load the network of a run. By default, nothing in the directory is executed.

    Args:
        path: run directory.
        weights: ``"last"``, ``"best"`` or ``"ema"`` (default: ``eval_weights`` of the run's recipe).
        trust_remote_code: import the model, data set, routing or schedule that the run names, if it is not registered.
            This executes the code of its module; without it, a ValueError names the module.
    """
    directory = RunDirectory.open(path)
    spec = directory.read_config(trust_remote_code)
    weights = weights or spec.recipe.eval_weights
    checkpoint, note = _read_weights(directory, weights)
    if weights == "ema" and not checkpoint.section("ema"):
        raise ValueError(f"{path} has no EMA weights: it was trained with --eval-weights {spec.recipe.eval_weights}")
    section = "ema" if weights == "ema" else "model"
    try:
        check_same_run(checkpoint, spec)
        check_model_size(checkpoint, spec, section)
        model = build_network(spec)
        checkpoint.load_weights(model, section)
        if math.prod(model.spec.image[1:]) > MAX_IMAGE_PIXELS:
            height, width = model.spec.image[1:]
            raise CheckpointError(f"its images of {height:,}x{width:,} pixels are larger than {MAX_IMAGE_PIXELS:,}")
        step, classes = checkpoint.step, checkpoint.class_names(model.spec.classes)
        pipeline = _load_pipeline(spec, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{directory.best if weights == 'best' else directory.last}: {error}") from error
    notes = [note] if note else []
    run = TrainedRun(directory.path, spec, model.eval(), pipeline, classes, weights, step)
    for name, limited in (("num_workers", run.num_workers), ("batch_size", run.batch_size)):
        value = spec.recipe.batch_size if name == "batch_size" else spec.num_workers
        if limited != value:
            notes.append(f"{name} {value:,} of {directory.config} is limited to {limited:,}")
    return dataclasses.replace(run, note="; ".join(notes))


def _read_weights(directory: RunDirectory, weights: str) -> tuple[Checkpoint, str]:
    """Return the checkpoint with the given weights, and a note if a newer one is damaged."""
    if weights == "best":
        if not directory.best.exists():
            raise ValueError(
                f"{directory.path} has no best checkpoint, which needs a validation set: train with --val-fraction 0.1"
            )
        return read_checkpoint(directory.best), ""
    checkpoint, problems = directory.newest_checkpoint()
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
    return torch.cat(correct)


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
            scores = torch.stack([output.scores for output in outputs]).mean(0)
            values = [
                float(batch_loss(objective, output, batch, run.step))
                for run, objective, output, batch in zip(runs, objectives, outputs, batches, strict=True)
            ]
            running.update(scores, batches[0].labels, sum(values) / len(values))
            if progress is not None:
                progress()
    return running.compute()


# image files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Prediction for an image file.

    Args:
        path: the file.
        classes: predicted classes, highest score first: one, or as many as `Network.predict_multi_hot` finds.
        scores: score of each class: length or activation of its capsule, or probability if the network gives logits.
        image: input of the network before normalization, ``[C, H, W]`` in 0..1.
        reconstruction: output of the decoder, ``None`` if the network has none.
        note: changes to the image, and low confidence; empty if there are none.
    """

    path: Path
    classes: tuple[str, ...]
    scores: tuple[float, ...]
    image: Tensor
    reconstruction: Tensor | None
    note: str


def predict(
    run: TrainedRun,
    path: str | os.PathLike[str],
    polarity: Polarity = "auto",
    fit: Fit | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Prediction:
    """Classify an image file of any size and mode.

    Args:
        run: the trained run.
        path: the image file.
        polarity: ``"inverted"`` inverts the brightness, ``"as-is"`` does not. ``"auto"`` inverts an image with a bright
            frame (dark ink on paper) if the network was trained on bright digits on black.
        fit: how an image of another aspect ratio is fitted: ``"crop"``, ``"pad"`` or ``"stretch"``. Default: as the
            run's directory of images; for single digits, the ink is located and centred as in MNIST; others are padded.
        max_megapixels: an image with more pixels is not decoded; at most 89.
    """
    path = Path(path).expanduser()
    pixels, changes = load_image(run, path, polarity, fit, max_megapixels)
    label = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        output = run.model(run.pipeline(Batch(pixels[None], label, pixels[None], label), train=False).images)
    scores = run.model.probabilities(output.scores.float())[0]
    predicted = run.model.predict_multi_hot(output.scores.float())[0]
    classes = tuple(run.classes[n] for n in scores.argsort(descending=True, stable=True).tolist() if predicted[n])
    reconstruction = None if output.reconstruction is None else output.reconstruction[0].float()
    notes = list(changes)
    if float(scores.max()) < MIN_CONFIDENT_SCORE:
        notes.append(f"low confidence: no score above {MIN_CONFIDENT_SCORE}")
    return Prediction(path, classes, tuple(scores.tolist()), pixels / 255, reconstruction, "; ".join(notes))


def load_image(
    run: TrainedRun,
    path: Path,
    polarity: Polarity = "auto",
    fit: Fit | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> tuple[Tensor, tuple[str, ...]]:
    """Read an image file as the data set of a run would contain it; the arguments are those of `predict`.

    Returns:
        The image before the run's pipeline, ``[C, H, W]``, uint8, and the changes that were made to it.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    channels, height, width = unprocessed_shape(run)
    if channels not in (1, 3):
        raise ValueError(f"{run.path} expects images with {channels} channels; image files have 1 or 3")
    if not 0 < max_megapixels <= PILLOW_MEGAPIXELS:
        raise ValueError(f"max_megapixels must be positive and at most {PILLOW_MEGAPIXELS:g}, got {max_megapixels}")
    size, background = (height, width), "white"
    image_format = ImageFormat(size, channels, "stretch", max_megapixels)
    overview = _read(path, image_format)
    if int(overview.max()) == int(overview.min()):
        background = "black"  # a white drawing on a transparent background is visible on black only
        overview = _read(path, image_format, background=background)
    if int(overview.max()) == int(overview.min()):
        raise DataError(f"{path} has one colour everywhere: it contains nothing to classify")
    invert = polarity == "inverted" or (polarity == "auto" and channels == 1 and _is_paper(overview, run))
    fill = "white" if invert else "black"
    center = fit is None and _has_centered_digits(run) and _file_size(path) != size
    if center:
        large = dataclasses.replace(image_format, size=(INK_SCALE * height, INK_SCALE * width), fit="pad")
        pixels = _read(path, large, fill, background)
    else:
        default = "crop" if is_image_folder(run.spec.recipe.data) else "pad"
        fitted = dataclasses.replace(image_format, fit=fit or run.spec.data_options.get("fit") or default)
        pixels = _read(path, fitted, fill, background)
    if invert:
        pixels = 255 - pixels
    if center:
        try:
            pixels = center_ink(pixels, size)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return pixels, ("inverted: bright ink expected",) * invert + ("ink centred as in MNIST",) * center


def _read(path: Path, image_format: ImageFormat, fill: str = "black", background: str = "white") -> Tensor:
    """Read an image file; raise a DataError, also for warnings of Pillow."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} can't be read as an image: the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return read_image(path, image_format, fill, background)
    except Exception as error:  # Pillow raises many types for damaged files
        reason = " ".join(str(error).split()).replace(f" {str(path)!r}", "") or type(error).__name__
        raise DataError(f"{path} can't be read as an image: {reason}") from error


def _file_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image file."""
    with import_optional("PIL.Image", "reading images").open(path) as image:
        return image.height, image.width


def _has_centered_digits(run: TrainedRun) -> bool:
    """Return whether a run was trained on single digits as in MNIST: bright, on black, centred."""
    return run.model.spec.image[0] == 1 and run.spec.recipe.data in CENTERED_DIGITS and run.model.n_objects == 1


def unprocessed_shape(run: TrainedRun) -> tuple[int, int, int]:
    """Return the shape of images before the pipeline crops or pads them to the network's input."""
    channels, height, width = run.model.spec.image
    for change in SIZE_CHANGES:
        shape = (channels, height + change, width + change)
        if min(shape) > 0:
            try:
                if run.pipeline.output_shape(shape, train=False) == run.model.spec.image:
                    return shape
            except ValueError:
                continue
    raise ValueError(
        f"no image size is known from which augmentation {run.spec.recipe.augmentation!r} makes images of "
        f"{channels}x{height}x{width}"
    )


def _is_paper(pixels: Tensor, run: TrainedRun) -> bool:
    """Return whether an image has a bright frame, and the run was trained on digits with a dark one."""
    if run.spec.recipe.data not in (*CENTERED_DIGITS, *OVERLAPPING_DIGITS):
        return False  # the polarity of other grey images is unknown
    frame = max(1, round(FRAME_FRACTION * min(pixels.shape[1:])))
    inner = pixels[:, frame:-frame, frame:-frame]
    n = pixels.numel() - inner.numel()
    mean = (float(pixels.sum()) - float(inner.sum())) / (255 * max(1, n))
    return mean > PAPER_BRIGHTNESS
