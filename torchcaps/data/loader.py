"""Loader: batches whose order and augmentation are functions of (seed, epoch, index)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from torchcaps._core.random import permute_indices
from torchcaps.data.base import Batch, Dataset, ImageShape
from torchcaps.data.pipelines import Pipeline, create_pipeline
from torchcaps.data.workers import prepare_worker, start_worker_server, worker_context

__all__ = ["Loader"]


class Loader:
    """Batches of a data set, shuffled and augmented.

    The augmentation of an image and its position in the epoch are functions of (seed, epoch, index). They depend
    neither on the number of workers nor on whether the epoch was interrupted and resumed. With several processes each
    one loads its part of every batch: together they see the batches that one process would see, each image once.

    Args:
        dataset: result of `create_dataset`.
        batch_size: images per batch, over all processes.
        pipeline: a pipeline or the name of one, see `list_pipelines`. If it needs statistics of the training set (the
            mean image of Chen 2019), the loader of the training set computes them; pass its pipeline to the loader of
            the test set, ``pipeline=train_loader.pipeline``.
        train: shuffle, and apply the pipeline's training transforms; by default true for the split ``"train"``.
        seed: seed of order and augmentation.
        num_workers: number of worker processes; 0 loads batches in this process. On Linux, workers are not forked from
            this process, and the data set is moved to shared memory; see `torchcaps.data.workers`.
        device: device of the batches. Workers augment on the CPU; for another device they return bytes, which are
            augmented there.
        rank, world_size: index of this process and number of processes.
        drop_last: omit the last batch if it is smaller. Otherwise the processes can have different numbers of batches
            and of images in the last one.

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
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Dataset):
            kind = type(dataset).__name__
            advice = "; use dataset.subset(indices) for a subset" if kind == "Subset" else ""
            raise TypeError(f"dataset must be a torchcaps.data.Dataset as create_dataset returns, got {kind}{advice}")
        _check_int64(batch_size=batch_size, seed=seed, num_workers=num_workers, rank=rank, world_size=world_size)
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if batch_size < world_size:
            raise ValueError(f"batch_size must be at least {world_size}, one image per process, got {batch_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, got {num_workers}")
        if not len(dataset):
            raise ValueError(f"{dataset.name}: split {dataset.split!r} has no images")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"drop_last leaves no batch: batch_size must be at most the number of images, {len(dataset):,}, "
                f"got {batch_size:,}"
            )
        if not isinstance(pipeline, Pipeline | str):
            raise TypeError(f"pipeline must be a Pipeline or the name of one, got {pipeline!r}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.pipeline = create_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
        if not self.pipeline.is_fitted:
            if dataset.split != "train":
                raise ValueError(
                    f"pipeline {pipeline!r} is not fitted and {dataset.name} is the split {dataset.split!r}: pass the "
                    "pipeline of the training set's loader, pipeline=train_loader.pipeline"
                )
            self.pipeline = self.pipeline.fit(dataset)
        self.train: bool = dataset.split == "train" if train is None else train
        self.shape: ImageShape = self.pipeline.output_shape(dataset.shape, self.train)
        self.device: torch.device = torch.device(device)
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self._workers_augment = self.device.type == "cpu"
        if num_workers:
            start_worker_server()

    def __len__(self) -> int:
        """Number of batches per epoch in this process."""
        complete, rest = divmod(len(self.dataset), self.batch_size)
        return complete + (rest > self.rank and not self.drop_last)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch, the last and smaller one included, over all processes."""
        return -(-len(self.dataset) // self.batch_size)

    def indices(self, epoch: int, batch_index: int) -> Tensor:
        """Return the data set indices of this process's images in a batch, ``[B]``."""
        start = batch_index * self.batch_size
        end = min(start + self.batch_size, len(self.dataset))
        positions = torch.arange(start + self.rank, end, self.world_size)
        return permute_indices(positions, len(self.dataset), self.seed, epoch) if self.train else positions

    def batch(self, epoch: int, batch_index: int) -> Batch:
        """Return one batch of an epoch; earlier batches are not loaded."""
        _check_int64(epoch=epoch, batch_index=batch_index)
        if not 0 <= batch_index < len(self):
            raise IndexError(f"batch_index must be in 0..{len(self) - 1}, got {batch_index}")
        return self._transform(self._load(epoch, batch_index), epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, starting with batch ``start``."""
        _check_int64(epoch=epoch, start=start)
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be in 0..{len(self)}, the number of batches per epoch, got {start}")
        batch_indices = range(start, len(self))
        if not self.num_workers:
            return (self.batch(epoch, batch_index) for batch_index in batch_indices)
        return self._iterate_with_workers(epoch, batch_indices)

    def __iter__(self) -> Iterator[Batch]:
        if self.train:
            raise TypeError(
                "a training loader can't be iterated without an epoch, which determines order and augmentation: "
                "use loader.epoch(0), loader.epoch(1), ..."
            )
        return self.epoch(0)

    def _load(self, epoch: int, batch_index: int) -> Batch:
        return self.dataset.get_batch(self.indices(epoch, batch_index), epoch)

    def _transform(self, batch: Batch, epoch: int) -> Batch:
        return self.pipeline(batch.to(self.device), self.seed, epoch, self.train)

    def _iterate_with_workers(self, epoch: int, batch_indices: range) -> Iterator[Batch]:
        """Yield batches that worker processes prepare."""
        batches = _EpochBatches(self, epoch)
        loader = DataLoader(
            batches,
            batch_size=None,
            sampler=batch_indices,
            num_workers=self.num_workers,
            multiprocessing_context=worker_context(batches, self.dataset),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the global generator, which dropout uses, must not advance
            worker_init_fn=prepare_worker,
        )
        for images, labels, targets, indices in loader:
            batch = Batch(images, labels, images if targets is None else targets, indices)
            yield batch if self._workers_augment else self._transform(batch, epoch)


def _check_int64(**arguments: int) -> None:
    """Raise if an argument is not an int that fits into 64 bits."""
    for name, value in arguments.items():
        if not hasattr(value, "__index__") or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must be a 64-bit integer, got {value}")


class _EpochBatches(TorchDataset[tuple[Tensor | None, ...]]):
    """The batches of an epoch by index, for torch's worker processes."""

    def __init__(self, loader: Loader, epoch: int) -> None:
        self.loader, self.epoch = loader, epoch

    def __getitem__(self, batch_index: int) -> tuple[Tensor | None, ...]:
        batch = self.loader._load(self.epoch, batch_index)
        if self.loader._workers_augment:
            batch = self.loader._transform(batch, self.epoch)
        # targets that are identical to the images are not transferred twice
        return batch.images, batch.labels, None if batch.targets is batch.images else batch.targets, batch.indices
