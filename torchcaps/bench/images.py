"""Accuracy on own images: the default capsule network against a plain CNN that trains for the same time.

The photographs are CIFAR-10 images of five classes: the first 320 training images of each, written as a directory of
PNG files, and all test images. Both networks train with their recipes on one thread until the CPU time of the process
has increased by the budget.

The recipe of the capsule network (label smoothing or not) was chosen among two variants by the accuracy of one seed on
the test images of ``images-32``, so that ``images-32`` and ``images-64`` are not independent of that choice.
``images-held-out`` is: it has the other five classes, which were first used after the choice.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.optional import import_optional
from torchcaps.data import Dataset, create_dataset
from torchcaps.training import RunSpec, TrainResult, load_run, train
from torchcaps.training.errors import RunInterrupted
from torchcaps.training.inference import evaluate_runs
from torchcaps.training.logging import ConsoleLogger
from torchcaps.training.run_dir import RunDirectory

__all__ = ["BASELINE", "IMAGE_CASES", "MODEL", "ImageCase", "baseline_spec", "measure_images", "train_baseline"]

MODEL, BASELINE = "capsnet_images", "cnn_images"
CLASSES = ("airplane", "automobile", "cat", "frog", "ship")
HELD_OUT_CLASSES = ("bird", "deer", "dog", "horse", "truck")
UNLIMITED_EPOCHS = 1_000_000  # the time ends the training
# Fields of the run and of the recipe that the baseline takes over: its data, not its training.
SHARED_FIELDS = (
    "data_options",
    "test_options",
    "data_dir",
    "seed",
    "num_threads",
    "num_workers",
    "device",
    "devices",
    "max_train_images",
    "max_test_images",
)
SHARED_RECIPE_FIELDS = ("data", "test_data", "val_fraction", "class_weights")


# Comparison on a user's data --------------------------------------------------------------------------------


def baseline_spec(spec: RunSpec, seconds: float) -> RunSpec:
    """Return the run of the baseline with the data, seed and devices of another run.

    Args:
        spec: settings of the other run.
        seconds: training time of the baseline.
    """
    baseline = RunSpec(BASELINE, max_minutes=seconds / 60, **{name: getattr(spec, name) for name in SHARED_FIELDS})
    recipe = {name: getattr(spec.recipe, name) for name in SHARED_RECIPE_FIELDS}
    return baseline.replace_recipe(**recipe, epochs=UNLIMITED_EPOCHS)


def train_baseline(result: TrainResult, console: ConsoleLogger | None = None) -> TrainResult:
    """Train the baseline on the data of a finished run, for the time that its training took.

    Args:
        result: the finished run.
        console: prints the progress.
    """
    spec = RunDirectory.open(result.path).read_config(trust_remote_code=result.names_own_code)
    return train(baseline_spec(spec, result.seconds), Path(f"{result.path}-cnn"), console=console)


# Benchmark --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageCase:
    """A benchmark on photographs.

    Args:
        side: height and width of the images; CIFAR-10 images are upsampled to it.
        seconds: CPU time of each training.
        n_train: number of training images per class.
        n_test: number of test images per class.
        classes: classes of CIFAR-10.
    """

    side: int
    seconds: float
    n_train: int = 320
    n_test: int = 1000
    classes: tuple[str, ...] = CLASSES


IMAGE_CASES = {
    "images-32": ImageCase(32, 80.0),
    "images-64": ImageCase(64, 160.0),
    "images-held-out": ImageCase(32, 80.0, classes=HELD_OUT_CLASSES),
}


def measure_images(name: str, case: ImageCase, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per seed and model: test accuracy after the same CPU time on one thread.

    Args:
        name: name of the case in the rows.
        case: sizes and CPU time.
        seeds: seeds of the trainings.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for split, count in (("train", case.n_train), ("test", case.n_test)):
            write_photographs(create_dataset("cifar10", split), root / split, case.side, count, case.classes)
        test_set = create_dataset(str(root / "test"), "all", cache=False)
        for seed in seeds:
            for model in (MODEL, BASELINE):
                yield {"kind": "images", "case": name, "side": case.side, "seconds": case.seconds, "seed": seed} | (
                    _measure_model(model, root, test_set, case.seconds, seed)
                )


def write_photographs(
    dataset: Dataset, directory: Path, side: int, count: int, classes: tuple[str, ...] = CLASSES
) -> None:
    """Write the first images of some classes as PNG files, one directory per class.

    Args:
        dataset: CIFAR-10, or another data set with these classes.
        directory: directory of the classes.
        side: height and width of the files.
        count: number of images per class.
        classes: the classes.
    """
    pillow = import_optional("PIL.Image", "writing images")
    labels = torch.as_tensor(dataset.labels)  # type: ignore[attr-defined]
    for name in classes:
        (directory / name).mkdir(parents=True)
        indices = (labels == dataset.classes.index(name)).nonzero()[:count, 0]
        for index, pixels in zip(indices.tolist(), dataset.get_batch(indices).images, strict=True):
            image = pillow.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            image.resize((side, side), pillow.Resampling.BILINEAR).save(directory / name / f"{index:05d}.png")


def _measure_model(model: str, root: Path, test_set: Dataset, seconds: float, seed: int) -> dict[str, Any]:
    """Return accuracy, epochs and CPU time of one training."""
    options = {"val_fraction": 0.0, "test_fraction": 0.0, "cache": False}
    changes = {"data": str(root / "train"), "data_options": options, "epochs": UNLIMITED_EPOCHS}
    spec = RunSpec.of(model, max_minutes=seconds / 60, num_threads=1, seed=seed, device="cpu", **changes)
    started = time.process_time()
    out = root / f"{model}-{seed}"
    try:
        result = train(spec, out, console=ConsoleLogger(False), figures=False, clock=time.process_time)
    except RunInterrupted:
        raise KeyboardInterrupt from None  # nothing to resume: the directory is temporary
    cpu_seconds = time.process_time() - started
    run = load_run(out)
    evaluation = evaluate_runs([run], test_set)
    return {
        "model": model,
        "parameters": run.model.n_parameters,
        "accuracy": evaluation.accuracy,
        "n_test": evaluation.n,
        "epochs": round(result.epochs, 2),
        "training_seconds": round(result.seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
    }
