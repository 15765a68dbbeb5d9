"""Batches of a data set, in an order and with augmentation that are functions of (seed, epoch, index)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from torchcaps._core.random import permute_indices
from torchcaps.data.base import Dataset
from torchcaps.data.batch import Batch
from torchcaps.data.pipelines import Pipeline, create_pipeline
from torchcaps.data.transforms import Shape

__all__ = ["Loader"]


class Loader:
    """Batches of a data set.

    What an image looks like, and at which step it comes, depends on seed, epoch and index alone: not on the number of
    workers, nor on where an epoch was broken off and taken up again. Several processes share every batch between them,
    so that together they see what one would have seen, each image once.

    Args:
        dataset: what `create_dataset` returns.
        batch_size: images in a batch, those of all processes together.
        pipeline: how images are prepared, or the name of a paper's way; see `list_pipelines`. What it must know of the
            training set (the mean image of Chen 2019) is found out here; give the loader of the test set the same,
            ``pipeline=train_loader.pipeline``.
        train: whether to shuffle, and to use the pipeline's steps for training; by default for the split ``"train"``.
        seed: of order and augmentation.
        workers: processes that make batches ahead; 0 makes them when they are asked for.
        device: where the batches go. On the CPU workers augment; for another device they hand over bytes, and images
            are augmented there.
        rank, world: which of how many processes this is.
        drop_last: leave out the last batch where it is smaller. Without it the processes may have different numbers of
            batches, and of images in the last.

    >>> from torchcaps.data import create_dataset
    >>> loader = Loader(create_dataset("digits"), 64, pipeline="sabour2017.mnist")
    >>> batch = next(loader.epoch(0))
    >>> batch.images.shape, batch.labels.shape
    (torch.Size([64, 1, 28, 28]), torch.Size([64]))
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        pipeline: Pipeline | str = "",
        train: bool | None = None,
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Dataset):
            kind = type(dataset).__name__
            advice = "; dataset.subset(indices) is a part of one" if kind == "Subset" else ""
            raise TypeError(f"dataset must be what create_dataset returns, got a {kind}{advice}")
        _check_whole(batch_size=batch_size, seed=seed, workers=workers, rank=rank, world=world)
        if world < 1:
            raise ValueError(f"world must be 1 or more, the number of processes, got {world}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be one of the {world} processes, 0 to {world - 1}, got {rank}")
        if batch_size < world:
            raise ValueError(f"batch_size must be {world} or more, one image for each process, got {batch_size}")
        if workers < 0:
            raise ValueError(f"workers must be 0 or more, got {workers}")
        if not len(dataset):
            raise ValueError(f"{dataset.name}, split {dataset.split!r}, has no images")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(f"drop_last leaves nothing: {len(dataset):,} images are no batch of {batch_size:,}")
        if not isinstance(pipeline, Pipeline | str):
            raise TypeError(f"pipeline must be a Pipeline([...]) or the name of one, got {pipeline!r}")
        self.dataset, self.batch_size, self.seed, self.workers = dataset, batch_size, seed, workers
        self.pipeline = create_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
        if not self.pipeline.fitted:
            if dataset.split != "train":
                which = f"pipeline {pipeline!r}" if isinstance(pipeline, str) else "pipeline"
                advice = "give that of its loader, pipeline=train_loader.pipeline"
                raise ValueError(f"this {which} must see the training set first: {advice}")
            self.pipeline = self.pipeline.fit(dataset)
        self.train = dataset.split == "train" if train is None else train
        self.shape: Shape = self.pipeline.shape(dataset.shape, self.train)
        self.device, self.rank, self.world, self.drop_last = torch.device(device), rank, world, drop_last

    def __len__(self) -> int:
        """How many batches an epoch has for this process."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > self.rank and not self.drop_last)

    def indices(self, epoch: int, number: int) -> Tensor:
        """Return which images this process has in a batch of an epoch."""
        start = number * self.batch_size
        end = min(start + self.batch_size, len(self.dataset))
        positions = torch.arange(start + self.rank, end, self.world)
        return permute_indices(positions, len(self.dataset), self.seed, epoch) if self.train else positions

    def batch(self, epoch: int, number: int) -> Batch:
        """Return one batch of an epoch by its number: any of them, without those before."""
        _check_whole(epoch=epoch, number=number)
        if not 0 <= number < len(self):
            raise IndexError(f"an epoch has {len(self):,} batches, got number {number}")
        return self._finished(self._fetched(epoch, number), epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch, from number ``start`` on."""
        _check_whole(epoch=epoch, start=start)
        if not 0 <= start <= len(self):
            raise ValueError(f"start must lie in 0..{len(self)}, the batches of an epoch, got {start}")
        numbers = range(start, len(self))
        if not self.workers:
            return (self.batch(epoch, number) for number in numbers)
        return self._worked(epoch, numbers)

    def __iter__(self) -> Iterator[Batch]:
        if self.train:
            raise TypeError("which epoch? Each has its own order and augmentation: 'for batch in loader.epoch(number)'")
        return self.epoch(0)

    @property
    def _workers_augment(self) -> bool:
        return self.device.type == "cpu"

    def _fetched(self, epoch: int, number: int) -> Batch:
        return self.dataset.examples(self.indices(epoch, number), epoch)

    def _finished(self, batch: Batch, epoch: int) -> Batch:
        return self.pipeline(batch.to(self.device), self.seed, epoch, self.train)

    def _worked(self, epoch: int, numbers: range) -> Iterator[Batch]:
        loader = DataLoader(
            _Batches(self, epoch),
            batch_size=None,
            sampler=numbers,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # or it would take a number of torch's own, which dropout needs
        )
        for images, labels, targets, indices in loader:
            batch = Batch(images, labels, images if targets is None else targets, indices)
            yield batch if self._workers_augment else self._finished(batch, epoch)


def _check_whole(**numbers: int) -> None:
    for name, number in numbers.items():
        if not hasattr(number, "__index__") or isinstance(number, bool):
            raise TypeError(f"{name} must be a whole number, got {number!r}")
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{name} must be a number of 64 bits, got {number}")


class _Batches(TorchDataset[tuple[Tensor | None, ...]]):
    """The batches of an epoch by number, as torch's workers want them."""

    def __init__(self, loader: Loader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __getitem__(self, number: int) -> tuple[Tensor | None, ...]:
        batch = self.loader._fetched(self.epoch, number)
        if self.loader._workers_augment:
            batch = self.loader._finished(batch, self.epoch)
        # targets that are the images themselves need not travel twice
        return batch.images, batch.labels, None if batch.targets is batch.images else batch.targets, batch.indices
