"""The loader: what an image looks like is a function of (seed, epoch, index) alone."""

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

from torchcaps.data import Batch, Dataset, ImageSet, Loader, create_dataset

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = "choi2019.mnist+official"


def fingerprints(batches: Iterable[Batch]) -> dict[int, str]:
    """The bits of each image, label and target, by index; an index that comes twice is an error."""
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
def test_any_number_of_workers_gives_the_same_batches(digits: Dataset, expected: dict[int, str], workers: int) -> None:
    loader = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=workers)
    plain = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5)
    count = 0
    for number, batch in enumerate(loader.epoch(3)):
        assert torch.equal(batch.indices, plain.indices(3, number))
        assert fingerprints([batch]).items() <= expected.items()
        count += len(batch.indices)
    assert count == 1000


@pytest.mark.parametrize("batch_size", [1000, 7, 128])
def test_any_batch_size_gives_the_same_images(digits: Dataset, expected: dict[int, str], batch_size: int) -> None:
    assert fingerprints(Loader(digits, batch_size, pipeline=PIPELINE, train=True, seed=5).epoch(3)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restart_goes_on_where_the_epoch_was_broken_off(digits: Dataset, workers: int) -> None:
    whole = [b.images for b in Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5).epoch(3)]
    again = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=workers)
    rest = [b.images for b in again.epoch(3, start=9)]
    assert len(whole) == len(again) == 16
    assert len(rest) == 7
    assert all(torch.equal(a, b) for a, b in zip(whole[9:], rest, strict=True))
    assert list(again.epoch(3, start=16)) == []


SCRIPT = """
import json, sys
from tests.data.test_loader import PIPELINE, fingerprints
from torchcaps.data import Loader, create_dataset
rank, world = int(sys.argv[1]), int(sys.argv[2])
loader = Loader(create_dataset("digits", "test"), 64, pipeline=PIPELINE, train=True, seed=5, rank=rank, world_size=world)
print(json.dumps([fingerprints([batch]) for batch in loader.epoch(3)]))
"""


def test_two_processes_share_every_batch(digits: Dataset, expected: dict[int, str]) -> None:
    """Each has its share and none twice, and together they see at every step what one process would have seen."""
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), "2"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    shares = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    alone = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5)
    assert len(shares[0]) == len(shares[1]) == len(alone)
    everything: dict[int, str] = {}
    for number, steps in enumerate(zip(*shares, strict=True)):
        here = {int(index): bits for share in steps for index, bits in share.items()}
        assert len(here) == sum(map(len, steps))
        assert set(here) == set(alone.indices(3, number).tolist())
        assert not set(here) & set(everything)
        everything |= here
    assert everything == expected


@pytest.mark.parametrize(("world", "batch_size", "drop_last"), [(3, 64, False), (3, 64, True), (7, 10, False)])
def test_shares_of_any_number_of_processes(digits: Dataset, world: int, batch_size: int, drop_last: bool) -> None:
    seen: list[int] = []
    lengths = []
    for rank in range(world):
        loader = Loader(digits, batch_size, train=True, rank=rank, world_size=world, drop_last=drop_last)
        batches = [loader.indices(0, number) for number in range(len(loader))]
        assert all(len(indices) for indices in batches)
        lengths.append(len(loader))
        seen += [index for indices in batches for index in indices.tolist()]
    assert len(set(seen)) == len(seen) == (960 if drop_last else 1000)
    if drop_last:
        assert len(set(lengths)) == 1


def test_an_empty_share_is_no_batch() -> None:
    """101 images in batches of 100 for two processes: the second has no part in the last."""
    dataset = ImageSet("some", "train", torch.zeros(101, 1, 2, 2, dtype=torch.uint8), torch.zeros(101), ["a", "b"])
    assert [len(Loader(dataset, 100, rank=rank, world_size=2)) for rank in range(2)] == [2, 1]


def test_epochs_and_seeds_differ_and_tests_are_in_order(digits: Dataset) -> None:
    first, later = (fingerprints(Loader(digits, 64, pipeline=PIPELINE, train=True).epoch(e)) for e in (0, 1))
    assert sum(first[index] == later[index] for index in first) < 20
    orders = {
        tuple(Loader(digits, 64, train=True, seed=seed).indices(epoch, 0).tolist())
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    }
    assert len(orders) == 3
    loader = Loader(digits, 300, pipeline=PIPELINE)  # the split is "test", so nothing is shuffled or augmented
    assert torch.cat([batch.indices for batch in loader]).tolist() == list(range(1000))
    assert torch.equal(loader.batch(0, 0).images, digits.get_batch(torch.arange(300)).images / 255)


def test_on_another_device_workers_hand_over_bytes(
    digits: Dataset, expected: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "_workers_augment", False)
    loader = Loader(digits, 64, pipeline=PIPELINE, train=True, seed=5, num_workers=1)
    assert fingerprints(loader.epoch(3)) == expected


def test_sets_that_are_made_anew_are_new_in_every_epoch_of_the_loader() -> None:
    loader = Loader(create_dataset("diverse-multimnist", source="digits"), 4000)
    first, later = ({int(i): bits for i, bits in fingerprints(loader.epoch(e)).items()} for e in (0, 1))
    assert sum(first[index] == later[index] for index in first) < 10


def test_seeds_change_what_an_image_looks_like(digits: Dataset) -> None:
    first, other = (fingerprints(Loader(digits, 500, pipeline=PIPELINE, train=True, seed=s).epoch(0)) for s in (0, 1))
    assert sum(first[index] == other[index] for index in first) < 10


def test_workers_leave_torchs_own_chance_alone(digits: Dataset) -> None:
    """Or dropout would depend on the number of workers."""
    drawn = []
    for workers in (0, 1, 2):
        torch.manual_seed(0)
        next(iter(Loader(digits, 500, num_workers=workers).epoch(0)))
        drawn.append(float(torch.rand(1)))
    assert len(set(drawn)) == 1


def test_a_training_loader_asks_which_epoch(digits: Dataset) -> None:
    with pytest.raises(TypeError, match="which epoch"):
        iter(Loader(digits, 8, train=True))
    assert len(list(Loader(digits, 500))) == 2


def test_a_pipeline_that_must_know_the_training_set_learns_it_in_its_loader(digits: Dataset) -> None:
    train = Loader(create_dataset("digits"), 64, pipeline="chen2019.cifar10")
    assert train.pipeline.fitted
    assert abs(float(torch.cat([b.images for b in train.epoch(0)]).mean())) < 1e-5
    with pytest.raises(ValueError, match=r"'chen2019\.cifar10' must see the training set first"):
        Loader(digits, 64, pipeline="chen2019.cifar10")
    test = Loader(digits, 1000, pipeline=train.pipeline)
    assert 1e-5 < abs(float(test.batch(0, 0).images.mean())) < 0.01


def test_a_part_of_a_data_set(digits: Dataset) -> None:
    part = digits.subset(torch.arange(100, 200), split="train")
    assert len(part) == 100
    assert torch.equal(part.get_batch(torch.tensor([3])).images, digits.get_batch(torch.tensor([103])).images)
    assert len(fingerprints(Loader(part, 32, pipeline=PIPELINE).epoch(0))) == 100
    assert isinstance(digits, ImageSet)
    threes = digits.subset(digits.labels == 3)
    assert isinstance(threes, ImageSet)
    assert threes.labels.tolist() == [3] * 100
    pairs = create_dataset("multimnist", "test", source="digits")
    for indices in ([5, 7], range(5, 9, 2), torch.tensor([5, 7], dtype=torch.uint8), torch.tensor([5, 7]).numpy()):
        for whole in (digits, pairs):
            part = whole.subset(indices)
            assert torch.equal(part.get_batch(torch.tensor([1])).images, whole.get_batch(torch.tensor([7])).images)
    with pytest.raises(ValueError, match=r"indices must lie in 0\.\.999"):
        digits.subset(torch.tensor([1000]))
    for odd in (torch.rand(3), torch.zeros(2, 2).long(), torch.tensor([True, False])):
        with pytest.raises(
            ValueError, match="indices must be a list of whole numbers, or a truth value for each image"
        ):
            digits.subset(odd)
    with pytest.raises(TypeError, match=r"got a Subset; dataset.subset\(indices\) is a part of one"):
        Loader(torch.utils.data.Subset(digits, [1, 2]), 2)  # type: ignore[arg-type]


def test_image_sets_of_ones_own_are_checked() -> None:
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    cases = [
        (images.float(), labels, "images must be bytes"),
        (images[:, 0], labels, r"of \[N, C, H, W\], got torch.uint8 of \[4, 2, 2\]"),
        (images, labels[:3], "one number for each of 4 images"),
        (images, labels + 1, "labels must be 0 to 1, one for each class, got 1 to 2"),
    ]
    for pixels, numbers, said in cases:
        with pytest.raises(ValueError, match=said):
            ImageSet("mine", "train", pixels, numbers, ["a", "b"])


def test_targets_are_the_images_unless_colours_change(digits: Dataset) -> None:
    for workers in (0, 1):
        batch = next(iter(Loader(digits, 8, pipeline="sabour2017.mnist", train=True, num_workers=workers).epoch(0)))
        assert batch.targets is batch.images
        assert batch.to("cpu").targets is batch.to("cpu").images


def test_several_objects_by_workers() -> None:
    dataset = create_dataset("multimnist", "test", source="digits")
    found = [fingerprints(itertools.islice(Loader(dataset, 32, num_workers=w, train=True).epoch(0), 3)) for w in (0, 2)]
    assert found[0] == found[1]
    assert len(found[0]) == 96


def test_torchs_own_loader_takes_our_data_sets(digits: Dataset) -> None:
    images, labels = next(iter(DataLoader(digits, batch_size=5)))
    assert images.shape == (5, 1, 28, 28)
    assert labels.tolist() == digits.get_batch(torch.arange(5)).labels.tolist()
    pairs = create_dataset("multimnist", "test", source="digits")
    images, labels, targets = next(iter(DataLoader(pairs, batch_size=3)))
    assert (images.shape, labels.shape, targets.shape) == ((3, 1, 36, 36), (3, 2), (3, 2, 1, 36, 36))
    assert torch.allclose(targets.sum(1).clamp(max=1), images)
    assert torch.equal(digits[-1][0], digits[999][0])
    assert torch.equal(digits[torch.tensor(3)][0], digits[3][0])  # as torch's Subset asks  # type: ignore[index]
    with pytest.raises(TypeError, match="index must be a whole number"):
        digits[0:3]  # type: ignore[index]
    with pytest.raises(IndexError, match="digits has 1,000 images, got index 1000"):
        digits[1000]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more, one image for each process, got 0"),
        ({"batch_size": 2, "world": 3}, "batch_size must be 3 or more"),
        ({"rank": 2, "world": 2}, "rank must be one of the 2 processes, 0 to 1, got 2"),
        ({"workers": -1}, "workers must be 0 or more"),
        ({"world": 0}, "world must be 1 or more"),
        ({"batch_size": 64.0}, "batch_size must be a whole number, got 64.0"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"pipeline": None}, "pipeline must be a Pipeline"),
        ({"pipeline": [1]}, "pipeline must be a Pipeline"),
        ({"batch_size": 2000, "drop_last": True}, "drop_last leaves nothing: 1,000 images are no batch of 2,000"),
        ({"seed": 2**64}, "seed must be a number of 64 bits"),
        ({"pipeline": "sabour2017.mist"}, "did you mean 'sabour2017.mnist'"),
        ({"pipeline": "sabour2017.smallnorb"}, "does not fit into images of 28x28"),
        ({"pipeline": "tsai2020.cifar10"}, "is for 3 channels, got images with 1"),
    ],
)
def test_bad_choices_are_refused(digits: Dataset, changes: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Loader(digits, **({"batch_size": 8} | changes))  # type: ignore[arg-type]


def test_batches_out_of_range_are_refused(digits: Dataset) -> None:
    loader = Loader(digits, 500)
    with pytest.raises(ValueError, match=r"start must lie in 0\.\.2"):
        loader.epoch(0, start=3)
    for number in (2, -1):
        with pytest.raises(IndexError, match=f"an epoch has 2 batches, got number {number}"):
            loader.batch(0, number)
    with pytest.raises(TypeError, match="epoch must be a whole number"):
        loader.epoch(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch must be a number of 64 bits"):
        loader.epoch(2**70)
    empty = ImageSet("some", "train", torch.zeros(0, 1, 2, 2, dtype=torch.uint8), torch.zeros(0), ["a"])
    with pytest.raises(ValueError, match="some, split 'train', has no images"):
        Loader(empty, 4)
