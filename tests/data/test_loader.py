"""Loader: images and their order are functions of (seed, epoch, index)."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.helpers import assert_bit_equal
from torchcaps.data import Batch, Dataset, ImageSet, Loader, create_dataset

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = "choi2019.mnist+official"


def fingerprints(batches: Iterable[Batch]) -> dict[int, str]:
    """Return a hash of each image with its label and target, by index; an index must not occur twice."""
    found: dict[int, str] = {}
    for batch in batches:
        for number, index in enumerate(batch.indices.tolist()):
            assert index not in found
            parts = (batch.images[number], batch.labels[number], batch.targets[number])
            found[index] = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    return found


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return create_dataset("digits", "test")


@pytest.fixture(scope="module")
def expected(digits: Dataset) -> dict[int, str]:
    return fingerprints(Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5).epoch(3))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_num_workers(digits: Dataset, expected: dict[int, str], workers: int) -> None:
    loader = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=workers)
    plain = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5)
    count = 0
    for batch_index, batch in enumerate(loader.epoch(3)):
        assert_bit_equal(batch.indices, plain.indices(3, batch_index))
        assert fingerprints([batch]).items() <= expected.items()
        count += len(batch.indices)
    assert count == 1000


@pytest.mark.parametrize("batch_size", [1000, 7, 128])
def test_images_do_not_depend_on_the_batch_size(digits: Dataset, expected: dict[int, str], batch_size: int) -> None:
    assert fingerprints(Loader(digits, batch_size, pipeline=PIPELINE, train=True, seed=5).epoch(3)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_can_be_resumed(digits: Dataset, workers: int) -> None:
    complete = [b.images for b in Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5).epoch(3)]
    again = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=workers)
    rest = [b.images for b in again.epoch(3, start=9)]
    assert len(complete) == len(again) == 16
    assert len(rest) == 7
    for actual, expected in zip(rest, complete[9:], strict=True):
        assert_bit_equal(actual, expected)
    assert list(again.epoch(3, start=16)) == []


SCRIPT = """
import json
from tests.data.test_loader import create_training_loader, fingerprints
loader = create_training_loader(rank=1, world_size=2)
print(json.dumps([fingerprints([batch]) for batch in loader.epoch(3)]))
"""


def create_training_loader(**options: int) -> Loader:
    return Loader(create_dataset("digits", "test"), 64, pipeline=PIPELINE, train=True, seed=5, **options)


def test_two_processes_share_each_batch(expected: dict[int, str]) -> None:
    """Together the processes see in each step the images that one process would see, each once."""
    second = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    parts = [[fingerprints([batch]) for batch in create_training_loader(rank=0, world_size=2).epoch(3)]]
    parts.append(json.loads(second.communicate(timeout=850)[0]))
    assert second.returncode == 0
    single = create_training_loader()
    assert [len(part) for part in parts] == [len(single)] * 2
    seen: dict[int, str] = {}
    for batch_index, shares in enumerate(zip(*parts, strict=True)):
        step = {int(index): digest for share in shares for index, digest in share.items()}
        assert len(step) == sum(map(len, shares))
        assert sorted(step) == sorted(single.indices(3, batch_index).tolist())
        assert set(step).isdisjoint(seen)
        seen |= step
    assert seen == expected


@pytest.mark.parametrize(("world", "batch_size", "drop_last"), [(3, 64, False), (3, 64, True), (7, 10, False)])
def test_partition_over_any_number_of_processes(digits: Dataset, world: int, batch_size: int, drop_last: bool) -> None:
    seen: list[int] = []
    lengths = []
    for rank in range(world):
        loader = Loader(digits, batch_size, train=True, rank=rank, world_size=world, drop_last=drop_last)
        batches = [loader.indices(0, number) for number in range(len(loader))]
        assert min(len(indices) for indices in batches) > 0
        lengths.append(len(loader))
        seen += [index for indices in batches for index in indices.tolist()]
    assert len(set(seen)) == len(seen) == (960 if drop_last else 1000)
    if drop_last:
        assert len(set(lengths)) == 1


def test_process_without_images_in_the_last_batch() -> None:
    """101 images in batches of 100 for two processes: the second one has no image in the last batch."""
    dataset = ImageSet("some", "train", torch.zeros(101, 1, 2, 2, dtype=torch.uint8), torch.zeros(101), ["a", "b"])
    assert [len(Loader(dataset, 100, rank=rank, world_size=2)) for rank in range(2)] == [2, 1]


def test_order_depends_on_epoch_and_seed_in_training_only(digits: Dataset) -> None:
    first, later = (fingerprints(Loader(digits, 64, pipeline=PIPELINE, train=True).epoch(e)) for e in (0, 1))
    assert sum(first[index] == later[index] for index in first) < 20
    orders = {
        tuple(Loader(digits, 64, train=True, seed=seed).indices(epoch, 0).tolist())
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    }
    assert len(orders) == 3
    loader = Loader(digits, 300, pipeline=PIPELINE)  # the split is "test", so nothing is shuffled or augmented
    assert torch.cat([batch.indices for batch in loader]).tolist() == list(range(1000))
    assert_bit_equal(loader.batch(0, 0).images, digits.get_batch(torch.arange(300)).images / 255)


def test_workers_return_bytes_for_another_device(digits: Dataset, expected: dict[int, str]) -> None:
    loader = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=1)
    loader._workers_augment = False
    assert fingerprints(loader.epoch(3)) == expected


def test_generated_images_differ_between_epochs() -> None:
    loader = Loader(create_dataset("diverse-multimnist", source="digits"), 4000)
    first, later = ({int(i): bits for i, bits in fingerprints(loader.epoch(e)).items()} for e in (0, 1))
    assert sum(first[index] == later[index] for index in first) < 10


def test_augmentation_depends_on_the_seed(digits: Dataset) -> None:
    first, other = (fingerprints(Loader(digits, 500, pipeline=PIPELINE, train=True, seed=s).epoch(0)) for s in (0, 1))
    assert sum(first[index] == other[index] for index in first) < 10


def test_workers_do_not_advance_the_global_generator(digits: Dataset) -> None:
    """Otherwise dropout would depend on the number of workers."""
    drawn = []
    for workers in (0, 1, 2):
        torch.manual_seed(0)
        next(iter(Loader(digits, 500, num_workers=workers).epoch(0)))
        drawn.append(float(torch.rand(1)))
    assert len(set(drawn)) == 1


def test_training_loader_needs_an_epoch(digits: Dataset) -> None:
    with pytest.raises(TypeError, match=r"loader\.epoch\("):
        iter(Loader(digits, 8, train=True))
    assert len(list(Loader(digits, 500))) == 2


def test_pipeline_is_fitted_by_the_training_loader(digits: Dataset) -> None:
    train = Loader(create_dataset("digits"), 64, pipeline="chen2019.cifar10")
    assert train.pipeline.is_fitted
    assert abs(float(torch.cat([b.images for b in train.epoch(0)]).mean())) < 1e-5
    with pytest.raises(ValueError, match=r"'chen2019\.cifar10'.*'test'"):
        Loader(digits, 64, pipeline="chen2019.cifar10")
    test = Loader(digits, 1000, pipeline=train.pipeline)
    assert 1e-5 < abs(float(test.batch(0, 0).images.mean())) < 0.01


def test_subset(digits: Dataset) -> None:
    part = digits.subset(torch.arange(100, 200), split="train")
    assert len(part) == 100
    assert_bit_equal(part.get_batch(torch.tensor([3])).images, digits.get_batch(torch.tensor([103])).images)
    assert len(fingerprints(Loader(part, 32, pipeline=PIPELINE).epoch(0))) == 100
    assert isinstance(digits, ImageSet)
    threes = digits.subset(digits.labels == 3)
    assert isinstance(threes, ImageSet)
    assert threes.labels.tolist() == [3] * 100
    pairs = create_dataset("multimnist", "test", source="digits")
    for indices in ([5, 7], range(5, 9, 2), torch.tensor([5, 7], dtype=torch.uint8), torch.tensor([5, 7]).numpy()):
        for parent in (digits, pairs):
            part = parent.subset(indices)
            assert_bit_equal(part.get_batch(torch.tensor([1])).images, parent.get_batch(torch.tensor([7])).images)
    with pytest.raises(ValueError, match=r"indices.* 0\.\.999, got 1000"):
        digits.subset(torch.tensor([1000]))
    for invalid in (torch.rand(3), torch.zeros(2, 2).long(), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=f"indices.*{invalid.dtype!s}"):
            digits.subset(invalid)
    with pytest.raises(TypeError, match=r"dataset.*Subset.*dataset\.subset"):
        Loader(torch.utils.data.Subset(digits, [1, 2]), 2)  # type: ignore[arg-type]


def test_image_set_checks_its_tensors() -> None:
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    cases = [
        (images.float(), labels, ["images", "torch.float32"]),
        (images[:, 0], labels, ["images", "[4, 2, 2]"]),
        (images, labels[:3], ["labels", "[3]"]),
        (images, labels + 1, ["labels", "1 to 2"]),
    ]
    for pixels, class_indices, mentions in cases:
        with pytest.raises(ValueError, match=r"^mine: ") as error:
            ImageSet("mine", "train", pixels, class_indices, ["a", "b"])
        for part in mentions:
            assert part in str(error.value)


def test_targets_are_the_images_without_color_transforms(digits: Dataset) -> None:
    for workers in (0, 1):
        batch = next(iter(Loader(digits, 8, pipeline="sabour2017.mnist", train=True, num_workers=workers).epoch(0)))
        assert batch.targets is batch.images
        assert batch.to("cpu").targets is batch.to("cpu").images


def test_workers_with_several_objects() -> None:
    dataset = create_dataset("multimnist", "test", source="digits")
    found = [fingerprints(itertools.islice(Loader(dataset, 32, num_workers=w, train=True).epoch(0), 3)) for w in (0, 2)]
    assert found[0] == found[1]
    assert len(found[0]) == 96


def test_torch_data_loader(digits: Dataset) -> None:
    images, labels = next(iter(DataLoader(digits, batch_size=5)))
    assert images.shape == (5, 1, 28, 28)
    assert labels.tolist() == digits.get_batch(torch.arange(5)).labels.tolist()
    pairs = create_dataset("multimnist", "test", source="digits")
    images, labels, targets = next(iter(DataLoader(pairs, batch_size=3)))
    assert (images.shape, labels.shape, targets.shape) == ((3, 1, 36, 36), (3, 2), (3, 2, 1, 36, 36))
    torch.testing.assert_close(targets.sum(1).clamp(max=1), images, rtol=1e-5, atol=1e-8)
    assert_bit_equal(digits[-1][0], digits[999][0])
    assert_bit_equal(digits[torch.tensor(3)][0], digits[3][0])  # as torch's Subset asks  # type: ignore[index]
    with pytest.raises(TypeError, match=r"index.*slice\(0, 3"):
        digits[0:3]  # type: ignore[index]
    with pytest.raises(IndexError, match=r"1,000.* 1000$"):
        digits[1000]


@pytest.mark.parametrize(
    ("arguments", "argument", "value"),
    [
        ({"batch_size": 0}, "batch_size", "0"),
        ({"batch_size": 2, "world_size": 3}, "batch_size", "2"),
        ({"rank": 2, "world_size": 2}, "rank", "2"),
        ({"num_workers": -1}, "num_workers", "-1"),
        ({"world_size": 0}, "world_size", "0"),
        ({"batch_size": 64.0}, "batch_size", "64.0"),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"pipeline": None}, "pipeline", "None"),
        ({"pipeline": [1]}, "pipeline", "[1]"),
        ({"batch_size": 2000, "drop_last": True}, "drop_last", "2,000"),
        ({"seed": 2**64}, "seed", str(2**64)),
        ({"pipeline": "sabour2017.mist"}, "'sabour2017.mist'", "'sabour2017.mnist'"),
        ({"pipeline": "sabour2017.smallnorb"}, "CenterCrop(size=32)", "28x28"),
        ({"pipeline": "tsai2020.cifar10"}, "3 channels", "1"),
    ],
)
def test_invalid_arguments(digits: Dataset, arguments: dict[str, object], argument: str, value: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        Loader(digits, **({"batch_size": 8} | arguments))  # type: ignore[arg-type]
    assert argument in str(error.value)
    assert value in str(error.value)


def test_invalid_epoch_and_batch_index(digits: Dataset) -> None:
    loader = Loader(digits, 500)
    with pytest.raises(ValueError, match=r"start.* 0\.\.2.* 3$"):
        loader.epoch(0, start=3)
    for batch_index in (2, -1):
        with pytest.raises(IndexError, match=rf"batch_index.* 0\.\.1, got {batch_index}$"):
            loader.batch(0, batch_index)
    with pytest.raises(TypeError, match=r"epoch.* 0\.5$"):
        loader.epoch(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"epoch.* {2**70}$"):
        loader.epoch(2**70)
    empty = ImageSet("some", "train", torch.zeros(0, 1, 2, 2, dtype=torch.uint8), torch.zeros(0), ["a"])
    with pytest.raises(ValueError, match=r"some.*'train'"):
        Loader(empty, 4)
