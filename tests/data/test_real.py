"""The official files, if TORCHCAPS_DATA has them: counts, statistics, first and last images, checksums."""

import hashlib
import os
from typing import Any

import pytest
import torch

from torchcaps.data import ImageSet, create_dataset
from torchcaps.data.inspect import FileStatus, check_availability, check_files, compute_statistics
from torchcaps.data.storage import data_root

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
# mean and standard deviation: the usual values of the training sets, and those of the test sets
EXPECTED_STATISTICS: list[tuple[str, str, int, list[int], list[float], list[float]]] = [
    ("mnist", "train", 60_000, MNIST_TRAIN, [0.1307], [0.3081]),
    ("mnist", "test", 10_000, MNIST_TEST, [0.1325], [0.3105]),
    ("fashion-mnist", "train", 60_000, [6000] * 10, [0.2860], [0.3530]),
    ("fashion-mnist", "test", 10_000, [1000] * 10, [0.2868], [0.3524]),
    ("cifar10", "train", 50_000, [5000] * 10, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ("cifar10", "test", 10_000, [1000] * 10, [0.4942, 0.4851, 0.4504], [0.2467, 0.2429, 0.2616]),
]
# MD5 of the pixels of the first and the last image, and their labels
FIRST_AND_LAST = {
    ("mnist", "train"): ("2ce86e4daeeff3a0cdebce6897c784ba", 5, "ef7f533798be7e6e26fc648e9e8bb37d", 8),
    ("mnist", "test"): ("1081cd3611ed4bea23c5769d20d414e5", 7, "4cbc26cd65a7520ac820c54476b7c1f8", 6),
    ("fashion-mnist", "train"): ("4faf81e309af5194c477affdbefc6116", 9, "2b9adbb3226eb357d90169dbaf62c14c", 5),
    ("fashion-mnist", "test"): ("a7ccdc296871349e7823556f7ce4b918", 9, "0679e37e18345b46f008d686722262e3", 5),
    ("cifar10", "train"): ("564903faacb68848fabcb0f46460d2b5", 6, "1d99508f8690b4cb22da5996be54fbd7", 1),
    ("cifar10", "test"): ("7fa1480f5617b07b9a04920865c7d55f", 3, "afccc589d8e60a955e33d2042f535962", 7),
}


def load_official(name: str, split: str) -> ImageSet:
    if not os.environ.get("TORCHCAPS_DATA"):
        pytest.skip("TORCHCAPS_DATA is not set")
    if split not in check_availability(name).splits:
        pytest.skip(f"the files of {name} are not in {data_root()}")
    dataset = create_dataset(name, split, download=False)
    assert isinstance(dataset, ImageSet)
    return dataset


@pytest.mark.parametrize(("name", "split", "count", "class_counts", "mean", "std"), EXPECTED_STATISTICS)
def test_statistics(
    name: str, split: str, count: int, class_counts: list[int], mean: list[float], std: list[float]
) -> None:
    dataset = load_official(name, split)
    statistics = compute_statistics(dataset)
    assert len(dataset) == statistics.n_sampled == count
    assert dataset.shape == ((3, 32, 32) if name == "cifar10" else (1, 28, 28))
    assert list(statistics.class_counts) == class_counts
    assert [round(x, 4) for x in statistics.mean] == mean
    assert [round(x, 4) for x in statistics.std] == std


@pytest.mark.parametrize(("name", "split"), list(FIRST_AND_LAST))
def test_first_and_last_image(name: str, split: str) -> None:
    dataset = load_official(name, split)
    actual: list[Any] = []
    for index in (0, -1):
        actual.append(hashlib.md5(dataset.images[index].numpy().tobytes(), usedforsecurity=False).hexdigest())
        actual.append(int(dataset.labels[index]))
    assert tuple(actual) == FIRST_AND_LAST[name, split]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_checksums(name: str) -> None:
    load_official(name, "test")
    assert {file.status for file in check_files(name, "test")} == {FileStatus.OK}


def test_embedded_digits_can_be_excluded() -> None:
    everything, rest = load_official("mnist", "train"), create_dataset("mnist", exclude_digits=True, download=False)
    assert isinstance(rest, ImageSet)
    assert len(rest) == 59_000
    counts = torch.bincount(everything.labels) - torch.bincount(rest.labels)
    assert counts.tolist() == [100] * 10


def test_sizes_of_generated_data_sets() -> None:
    load_official("mnist", "train")
    train, test = (create_dataset("multimnist", split, download=False) for split in ("train", "test"))
    assert (len(train), len(test)) == (60_000_000, 10_000_000)
    last = train.get_batch(torch.tensor([59_999_999]))
    assert int(last.labels[0, 0]) == 8  # the base is the last digit of the training set
    assert len(create_dataset("affnist-style", "test", download=False)) == 320_000
