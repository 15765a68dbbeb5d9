"""A run that was trained, to be used: its network with the weights that count, and how its images are prepared."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.data import Dataset, Loader, Pipeline, SubtractMeanImage, create_pipeline
from torchcaps.models import Network
from torchcaps.training.checkpoint import Checkpoint, check_same_run, read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError
from torchcaps.training.evaluation import Measures, Tally, loss_of
from torchcaps.training.run_dir import RunFolder
from torchcaps.training.setup import make_network

__all__ = ["Trained", "load_run", "measure", "right_images"]


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Args:
        path: the folder of its run.
        spec: what was chosen.
        model: the network, ready to be asked.
        pipeline: how its images are prepared.
        classes: their names.
        weights: which they are: ``"last"``, ``"best"`` or ``"ema"``.
        step: how many steps they were trained for.
        note: what is worth saying of how they were found.
    """

    path: Path
    spec: RunSpec
    model: Network
    pipeline: Pipeline
    classes: tuple[str, ...]
    weights: str
    step: int
    note: str = ""

    def loader(self, dataset: Dataset) -> Loader:
        """Return batches of a data set, prepared as this network wants them; refuse one that does not fit it."""
        shape = self.pipeline.output_shape(dataset.shape, train=False)
        if shape != self.model.spec.image:
            sizes = ["x".join(map(str, s)) for s in (self.model.spec.image, shape)]
            raise ValueError(f"{self.path} is for images of {sizes[0]}, and {dataset.name} has images of {sizes[1]}")
        if dataset.n_classes != self.model.spec.classes:
            counts = f"{self.model.spec.classes} classes, and {dataset.name} has {dataset.n_classes}"
            raise ValueError(f"{self.path} is for {counts}")
        if dataset.classes != self.classes:
            mine, theirs = (
                ", ".join(names[:4]) + ("..." if len(names) > 4 else "") for names in (self.classes, dataset.classes)
            )
            raise ValueError(f"{self.path} knows the classes {mine}, and {dataset.name} has {theirs}")
        if dataset.n_objects != self.model.n_objects:
            counts = (
                f"{self.model.n_objects or 'any number of'} in an image, and {dataset.name} has {dataset.n_objects}"
            )
            raise ValueError(f"{self.path} is for objects {counts}")
        return Loader(
            dataset, self.spec.recipe.batch_size, pipeline=self.pipeline, train=False, num_workers=self.spec.num_workers
        )


def load_run(path: str | os.PathLike[str], weights: str | None = None) -> Trained:
    """Return the network of a run.

    Args:
        path: the folder of the run.
        weights: ``"last"``, ``"best"`` or ``"ema"``; by default what its recipe says.
    """
    folder = RunFolder.existing(path)
    spec = folder.read_config()
    wanted = weights or spec.recipe.eval_weights
    checkpoint, note = _checkpoint(folder, wanted)
    model = make_network(spec)
    part = "ema" if wanted == "ema" and checkpoint.section("ema") else "model"
    if wanted == "ema" and part == "model":
        raise ValueError(f"{path} has no EMA weights: it was trained with --eval-weights {spec.recipe.eval_weights}")
    try:
        check_same_run(checkpoint, spec)
        checkpoint.load_weights(model, part)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.last if wanted != 'best' else folder.best}: {error}") from error
    step = int(checkpoint.state["run"]["step"])
    classes = tuple(checkpoint.state["classes"])
    return Trained(folder.path, spec, model.eval(), _pipeline(spec, checkpoint), classes, wanted, step, note)


def _checkpoint(folder: RunFolder, wanted: str) -> tuple[Checkpoint, str]:
    if wanted == "best":
        if not folder.best.exists():
            reason = "images have to be held out for one, by --val-fraction 0.1"
            raise ValueError(f"{folder.path} has no best checkpoint: {reason}")
        return read_checkpoint(folder.best), ""
    found, problems = folder.newest()
    if found is None:
        raise CheckpointError(problems[0] if problems else f"{folder.path} has no checkpoint yet")
    return found, f"{problems[0]}; the one before it is taken" if problems else ""


def _pipeline(spec: RunSpec, checkpoint: Checkpoint) -> Pipeline:
    """Return how images are prepared, with what was learnt of the training set."""
    pipeline = create_pipeline(spec.recipe.augmentation)
    means = iter(checkpoint.section("pipeline").values())
    mean = next(means, None)
    lists = [
        [
            dataclasses.replace(step, mean=mean) if isinstance(step, SubtractMeanImage) else step
            for step in pipeline.transforms(train)
        ]
        for train in (True, False)
    ]
    return Pipeline(*lists)


def right_images(run: Trained, dataset: Dataset) -> Tensor:
    """Return for each image whether a network recognises it: truth values, in the order of the data set."""
    with torch.no_grad():
        found = [
            run.model.is_correct(run.model(batch.images, batch.labels), batch.labels)
            for batch in run.loader(dataset).epoch(0)
        ]
    return torch.cat(found)


def measure(runs: list[Trained], dataset: Dataset, progress: object = None) -> Measures:
    """Test one network, or several together: the mean of their scores, as the papers do.

    Choi 2019 and Sabour 2017 (CIFAR-10) add up the lengths of the class capsules. The loss is the mean of theirs.
    """
    kinds = {run.model.recipe.loss.name for run in runs}
    if len(kinds) > 1:
        raise ValueError(
            f"runs with different losses can't be added up: their scores mean different things, got {sorted(kinds)}"
        )
    first = runs[0].model
    loaders = [run.loader(dataset) for run in runs]
    size = min(loader.batch_size for loader in loaders)
    for loader in loaders:
        loader.batch_size = size
    losses = [run.model.loss() for run in runs]
    tally = Tally(first)
    with torch.no_grad():
        for batches in zip(*(loader.epoch(0) for loader in loaders), strict=True):
            outputs = [run.model(batch.images, batch.labels) for run, batch in zip(runs, batches, strict=True)]
            scores = torch.stack([output.scores for output in outputs]).mean(0)
            values = [
                float(loss_of(loss, output, batch, run.step))
                for run, loss, output, batch in zip(runs, losses, outputs, batches, strict=True)
            ]
            tally.add(scores, batches[0].labels, sum(values) / len(values))
            if callable(progress):
                progress()
    return tally.measures()
