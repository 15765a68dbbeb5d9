"""Pipelines: the transforms that each paper applies to training and test images, by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.registry import check_name
from torchcaps.data.base import Batch, Dataset, ImageShape
from torchcaps.data.digit_augmentation import RandomErase, RandomMarginShift, RandomRotation, RandomSqueeze
from torchcaps.data.geometry import (
    CenterCrop,
    PadTo,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRelativeShift,
    RandomShift,
)
from torchcaps.data.transforms import (
    Normalize,
    RandomBrightness,
    RandomContrast,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    Transform,
)

__all__ = ["PIPELINES", "Pipeline", "create_pipeline", "list_pipelines"]


@dataclass(frozen=True)
class Pipeline:
    """Transforms that are applied to images before the network sees them.

    Args:
        train: transforms of training images.
        test: transforms of all other images; these should be deterministic, such as center crops.
        pregenerated: transform a training image in the same way in all epochs, as if the transformed images had been
            generated once, before the training.

    Bytes are scaled to 0..1 before the first transform unless a list contains `ScalePixels` itself. Reconstruction
    targets of a decoder pass through the geometric transforms only.

    Deviation: in Sabour's code the decoder, which ends in a sigmoid, reconstructs CIFAR-10 and smallNORB images after
    standardization, with values outside of its range; here targets are always in 0..1.

    >>> from torchcaps.data import CenterCrop, RandomCrop
    >>> pipeline = Pipeline(train=[RandomCrop(24)], test=[CenterCrop(24)])
    >>> pipeline.output_shape((3, 32, 32), train=True)
    (3, 24, 24)
    """

    train: Sequence[Transform] = ()
    test: Sequence[Transform] = ()
    pregenerated: bool = False

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            transforms = getattr(self, name)
            if not isinstance(transforms, list | tuple):
                raise TypeError(
                    f"Pipeline: {name} must be a list of transforms such as [RandomShift(2)], got {transforms!r}"
                )
            transforms = tuple(transforms)
            for transform in transforms:
                if not isinstance(transform, Transform):
                    raise TypeError(
                        f"Pipeline: {name} must contain transforms such as RandomShift(2), got {transform!r}"
                    )
            if not any(isinstance(transform, ScalePixels) for transform in transforms):
                transforms = (ScalePixels(), *transforms)
            object.__setattr__(self, name, transforms)

    def transforms(self, train: bool) -> tuple[Transform, ...]:
        """Return the transforms of training images if ``train``, else those of other images."""
        return tuple(self.train if train else self.test)

    def output_shape(self, shape: ImageShape, train: bool = True) -> ImageShape:
        """Return the shape of transformed images; raise a ValueError if a transform can't be applied."""
        for transform in self.transforms(train):
            shape = transform.output_shape(shape)
        return shape

    @property
    def is_fitted(self) -> bool:
        """Whether all statistics of the training set that the transforms need are known."""
        return all(transform.is_fitted for transform in self.transforms(True) + self.transforms(False))

    def fit(self, dataset: Dataset) -> "Pipeline":
        """Return the pipeline with the statistics of a training set that it needs, such as the mean image."""
        fitted: dict[tuple[Transform, int], Transform] = {}  # the same transform in both lists is fitted once
        lists: list[list[Transform]] = []
        for transforms in (self.transforms(True), self.transforms(False)):
            (scale, *_) = (transform.scale for transform in transforms if isinstance(transform, ScalePixels))
            for transform in transforms:
                if not transform.is_fitted and (transform, scale) not in fitted:
                    fitted[transform, scale] = transform.fit(dataset, scale)
            lists.append([t if t.is_fitted else fitted[t, scale] for t in transforms])
        return replace(self, train=lists[0], test=lists[1])

    def __call__(self, batch: Batch, seed: int = 0, epoch: int = 0, train: bool = True) -> Batch:
        """Transform a uint8 batch; random numbers are functions of (seed, epoch, image index)."""
        rng = CounterRNG(seed, 0 if self.pregenerated else epoch, batch.indices, "pipeline")
        images, targets = batch.images, batch.targets
        for transform in self.transforms(train):
            if not transform.applies_to_targets:
                images = transform(images, rng)
            elif targets is images:
                images = targets = transform(images, rng)
            else:
                images, targets = _transform_both(transform, images, targets, rng)
        return batch._replace(images=images, targets=targets)


def _transform_both(transform: Transform, images: Tensor, targets: Tensor, rng: CounterRNG) -> tuple[Tensor, Tensor]:
    """Transform images and targets as channels of one tensor, so that both get the same random numbers."""
    if images.dtype != targets.dtype:
        raise ValueError(f"{transform} applies to images and targets: it must precede all color transforms")
    both = transform(torch.cat([images, targets.flatten(1, -3)], dim=1), rng)
    transformed = both[:, images.shape[1] :]
    return both[:, : images.shape[1]], transformed.unflatten(1, targets.shape[1:-2])


_CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

PIPELINES: dict[str, Pipeline] = {
    "": Pipeline(),
    # Sabour 2017: section 5 (MNIST), and the authors' code for CIFAR-10 and smallNORB
    "sabour2017.mnist": Pipeline([RandomShift(2)]),
    "sabour2017.multimnist": Pipeline(),  # these two data sets shift the digits themselves
    "sabour2017.expanded-mnist": Pipeline(),
    "sabour2017.svhn": Pipeline(),
    "sabour2017.cifar10": Pipeline(
        [RandomCrop(24), RandomHorizontalFlip(), RandomBrightness(63 / 255), RandomContrast(0.2, 1.8), Standardize()],
        [CenterCrop(24), Standardize()],
    ),
    "sabour2017.smallnorb": Pipeline([RandomCrop(32), Standardize()], [CenterCrop(32), Standardize()]),
    "sabour2017.smallnorb-official": Pipeline(
        [RandomBrightness(63 / 255), RandomContrast(0.2, 1.8), RandomCrop(32), Standardize()],
        [CenterCrop(32), Standardize()],
    ),
    # Hinton 2018, section 5: standardized before the crop; the amounts of brightness and contrast are not stated
    "hinton2018.smallnorb": Pipeline(
        [Standardize(), RandomCrop(32), RandomBrightness(32 / 255), RandomContrast(0.5, 1.5)],
        [Standardize(), CenterCrop(32)],
    ),
    # Heinsen 2019, the authors' code: images of 96x96, padded to 128x128 by their edges
    "heinsen2019.smallnorb": Pipeline([RandomCrop(96, padding=16, fill="nearest")]),
    # Choi 2019, section 4: "+" marks augmented data; the authors' code also rotates MNIST and flips affNIST digits
    "choi2019.mnist": Pipeline(),
    "choi2019.mnist+": Pipeline([RandomAffine(shift=0.1, fill="nearest")]),
    "choi2019.mnist+official": Pipeline([RandomAffine(shift=0.1, rotation=20, fill="nearest")]),
    "choi2019.cifar10": Pipeline(),
    "choi2019.cifar10+": Pipeline([RandomAffine(shift=0.1, rotation=20, fill="nearest"), RandomHorizontalFlip()]),
    "choi2019.affnist": Pipeline([PadTo(40), RandomAffine(shift=0.2, fill="nearest")], [PadTo(40)]),
    "choi2019.affnist-pregenerated": Pipeline(
        [PadTo(40), RandomAffine(shift=0.2, fill="nearest")], [PadTo(40)], pregenerated=True
    ),
    "choi2019.affnist-official": Pipeline(
        [PadTo(40), RandomAffine(shift=0.2, fill="nearest"), RandomHorizontalFlip()], [PadTo(40)]
    ),
    # Chen 2019, the authors' prototxt files
    "chen2019.mnist": Pipeline([ScalePixels(256)], [ScalePixels(256)]),
    "chen2019.cifar10": Pipeline([ScalePixels(256), SubtractMeanImage()], [ScalePixels(256), SubtractMeanImage()]),
    # Photographs of any size: flips, and shifts by up to an eighth of the image or, for the plain CNN, by 4 pixels
    "photos": Pipeline([RandomRelativeShift(1 / 8), RandomHorizontalFlip()]),
    "photos-4px": Pipeline([RandomShift(4), RandomHorizontalFlip()]),
    # Tsai 2020, appendix A.2; numbers from the authors' code
    "tsai2020.cifar10": Pipeline([RandomCrop(32, padding=4), RandomHorizontalFlip(), _CIFAR], [_CIFAR]),
    "tsai2020.cifar100": Pipeline([RandomCrop(32, padding=4), RandomHorizontalFlip(), _CIFAR], [_CIFAR]),
    # Byerly 2021 and Mazzia 2021, the authors' code
    "byerly2021.mnist": Pipeline(
        [
            ScalePixels(256),
            RandomRotation(30),
            RandomMarginShift(),
            RandomSqueeze(),
            RandomErase(4, before=4, after=2),
            Normalize((0.5,), (0.5,)),
        ],
        [ScalePixels(256), Normalize((0.5,), (0.5,))],
    ),
    "byerly2021.smallnorb": Pipeline(
        [RandomCrop(32), RandomBrightness(0.25), RandomContrast(0.2, 1.8)], [CenterCrop(32)]
    ),
    "mazzia2021.mnist": Pipeline(
        [
            ScalePixels(256),
            RandomRotation(30, whole_degrees=True),
            RandomMarginShift(),
            RandomSqueeze(),
            RandomErase(4, before=4, after=2),
        ],
        [ScalePixels(256)],
    ),
    "mazzia2021.smallnorb": Pipeline(
        [Standardize(), RandomCrop(48), RandomBrightness(2.0), RandomContrast(0.5, 1.5)],
        [Standardize(), CenterCrop(48)],
    ),
}


def list_pipelines() -> list[str]:
    """Return the names of all pipelines, sorted.

    >>> "sabour2017.cifar10" in list_pipelines()
    True
    """
    return sorted(name for name in PIPELINES if name)


def create_pipeline(name: str) -> Pipeline:
    """Return a pipeline by name; the empty name only scales bytes to 0..1.

    >>> create_pipeline("sabour2017.mnist").train
    (ScalePixels(scale=255), RandomShift(max_shift=2))
    """
    return PIPELINES[name and check_name(name, list_pipelines(), "augmentation")]
