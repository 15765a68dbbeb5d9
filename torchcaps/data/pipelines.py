"""The papers' ways to prepare images, by name: each a list of steps for training, and one for testing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.registry import check_name
from torchcaps.data.base import Dataset
from torchcaps.data.batch import Batch
from torchcaps.data.colour import Brightness, Contrast, MeanImage, Normalize, Standardize
from torchcaps.data.geometry import Affine, CenterCrop, Flip, PadTo, RandomCrop, Shift
from torchcaps.data.transforms import Pixels, Shape, Step

__all__ = ["PIPELINES", "Pipeline", "create_pipeline", "list_pipelines"]


@dataclass(frozen=True)
class Pipeline:
    """What is done to images on their way to the network.

    Args:
        train: steps for training images.
        test: steps for all others, which should leave nothing to chance: crops in the middle, the same colours.

    Bytes become numbers in 0..1 before the first step, unless a list names `Pixels` itself. Targets of a decoder go
    through the steps that move images and not through those that change colours.

    Deviation: Sabour's code has its decoder, which ends in a sigmoid, reconstruct CIFAR-10 and smallNORB images after
    they were standardised, with values that it can't reach; here targets are in 0..1 always.
    """

    train: Sequence[Step] = ()
    test: Sequence[Step] = ()

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            steps = getattr(self, name)
            if not isinstance(steps, list | tuple):
                raise TypeError(f"Pipeline: {name} must be a list of steps such as [Shift(2)], got {steps!r}")
            steps = tuple(steps)
            for step in steps:
                if not isinstance(step, Step):
                    raise TypeError(f"Pipeline: {name} must be a list of steps such as Shift(2), got {step!r}")
            if not any(isinstance(step, Pixels) for step in steps):
                steps = (Pixels(), *steps)
            object.__setattr__(self, name, steps)

    def steps(self, train: bool) -> tuple[Step, ...]:
        """Return the steps for training, or those for testing."""
        return tuple(self.train if train else self.test)

    def shape(self, shape: Shape, train: bool = True) -> Shape:
        """Return what shape the network sees of images of a shape; raise where a step doesn't fit."""
        for step in self.steps(train):
            shape = step.shape(shape)
        return shape

    @property
    def fitted(self) -> bool:
        """Whether all steps know what they have to know of the training set."""
        return all(step.fitted for step in self.steps(True) + self.steps(False))

    def fit(self, dataset: Dataset) -> "Pipeline":
        """Return the pipeline with what it has to know of the training set, such as its mean image."""
        known: dict[tuple[Step, int], Step] = {}  # the same step in both lists is fitted once
        lists: list[list[Step]] = []
        for steps in (self.steps(True), self.steps(False)):
            (scale, *_) = (step.scale for step in steps if isinstance(step, Pixels))
            for step in steps:
                if not step.fitted and (step, scale) not in known:
                    known[step, scale] = step.fit(dataset, scale)
            lists.append([step if step.fitted else known[step, scale] for step in steps])
        return Pipeline(*lists)

    def __call__(self, batch: Batch, seed: int = 0, epoch: int = 0, train: bool = True) -> Batch:
        """Prepare a batch of bytes; chance depends on seed, epoch and the images' index alone."""
        draws = CounterRNG(seed, epoch, batch.indices, "pipeline")
        images, targets = batch.images, batch.targets
        for step in self.steps(train):
            if not step.targets_too:
                images = step(images, draws)
            elif targets is images:
                images = targets = step(images, draws)
            else:
                images, targets = _together(step, images, targets, draws)
        return batch._replace(images=images, targets=targets)


def _together(step: Step, images: Tensor, targets: Tensor, draws: CounterRNG) -> tuple[Tensor, Tensor]:
    """Take images and targets through a step as channels of one picture, so that chance moves both alike."""
    if images.dtype != targets.dtype:
        raise ValueError(f"{step} must come before steps that change colours: it is for images and targets alike")
    both = step(torch.cat([images, targets.flatten(1, -3)], dim=1), draws)
    moved = both[:, images.shape[1] :]
    return both[:, : images.shape[1]], moved.unflatten(1, targets.shape[1:-2])


_CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

PIPELINES: dict[str, Pipeline] = {
    "": Pipeline(),
    # Sabour 2017: section 5 (MNIST), and the authors' code for CIFAR-10 and smallNORB
    "sabour2017.mnist": Pipeline([Shift(2)]),
    "sabour2017.multimnist": Pipeline(),  # these two data sets move the digits themselves
    "sabour2017.expanded-mnist": Pipeline(),
    "sabour2017.svhn": Pipeline(),
    "sabour2017.cifar10": Pipeline(
        [RandomCrop(24), Flip(), Brightness(63 / 255), Contrast(0.2, 1.8), Standardize()],
        [CenterCrop(24), Standardize()],
    ),
    "sabour2017.smallnorb": Pipeline([RandomCrop(32), Standardize()], [CenterCrop(32), Standardize()]),
    "sabour2017.smallnorb-official": Pipeline(
        [Brightness(63 / 255), Contrast(0.2, 1.8), RandomCrop(32), Standardize()],
        [CenterCrop(32), Standardize()],
    ),
    # Hinton 2018, section 4: standardised before the crop; how much brightness and contrast is not said
    "hinton2018.smallnorb": Pipeline(
        [Standardize(), RandomCrop(32), Brightness(32 / 255), Contrast(0.5, 1.5)],
        [Standardize(), CenterCrop(32)],
    ),
    # Choi 2019, section 4: "+" is its sign for augmented data; its code turns MNIST and flips affNIST digits as well
    "choi2019.mnist": Pipeline(),
    "choi2019.mnist+": Pipeline([Affine(shift=0.1, fill="nearest")]),
    "choi2019.mnist+official": Pipeline([Affine(shift=0.1, rotation=20, fill="nearest")]),
    "choi2019.cifar10": Pipeline(),
    "choi2019.cifar10+": Pipeline([Affine(shift=0.1, rotation=20, fill="nearest"), Flip()]),
    "choi2019.affnist": Pipeline([PadTo(40), Affine(shift=0.2, fill="nearest")], [PadTo(40)]),
    "choi2019.affnist-official": Pipeline([PadTo(40), Affine(shift=0.2, fill="nearest"), Flip()], [PadTo(40)]),
    # Chen 2019, the authors' prototxt files
    "chen2019.mnist": Pipeline([Pixels(256)], [Pixels(256)]),
    "chen2019.cifar10": Pipeline([Pixels(256), MeanImage()], [Pixels(256), MeanImage()]),
    # Tsai 2020, appendix A.2, and the authors' code for the numbers
    "tsai2020.cifar10": Pipeline([RandomCrop(32, padding=4), Flip(), _CIFAR], [_CIFAR]),
    "tsai2020.cifar100": Pipeline([RandomCrop(32, padding=4), Flip(), _CIFAR], [_CIFAR]),
}


def list_pipelines() -> list[str]:
    """Return the names of all pipelines, sorted.

    >>> "sabour2017.cifar10" in list_pipelines()
    True
    """
    return sorted(name for name in PIPELINES if name)


def create_pipeline(name: str) -> Pipeline:
    """Return a pipeline by its name; the empty name is bytes over 255 and nothing else.

    >>> create_pipeline("sabour2017.mnist").train
    (Pixels(scale=255), Shift(most=2))
    """
    return PIPELINES[name and check_name(name, list_pipelines(), "augmentation")]
