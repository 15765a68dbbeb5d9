"""A small valid sample of every file format that the data sets read, and how it is loaded."""

import contextlib
import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from tests.data import writers
from tests.data.writers import random_bytes
from torchcaps.data import CIFAR10, CIFAR100, MNIST, SVHN, AffNIST, ImageSet, SmallNORB, create_dataset, images
from torchcaps.data.archives import extract_member
from torchcaps.data.images import ImageFormat, read_image

__all__ = ["Sample", "list_samples", "published"]


@dataclass(frozen=True)
class Sample:
    """Files of one reader.

    Args:
        name: name of the reader.
        target: path of the file that is mutated, below the data directory.
        files: content of all files by path.
        load: returns the tensors that are read from the directory.
        detects: whether a change of the file that changes the result must be reported. Otherwise the format has no
            redundancy and no checksum was published.
        wrap: applied to the mutated content of the target, for example compression.
        weight: relative number of mutants.
        is_pickle: whether the target is a pickle, so that calls are inserted into it.
    """

    name: str
    target: str
    files: dict[str, bytes]
    load: Callable[[Path], list[Tensor]]
    detects: bool = False
    wrap: Callable[[bytes], bytes] = field(default=lambda data: data)
    weight: int = 10
    is_pickle: bool = False


def _tensors(name: str, **options: Any) -> Callable[[Path], list[Tensor]]:
    def load(root: Path) -> list[Tensor]:
        dataset = create_dataset(name, "train" if name == "folder" else "test", root, download=False, **options)
        assert isinstance(dataset, ImageSet)
        return [dataset.images, dataset.labels, *dataset.metadata.values()]

    return load


def _compress(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def _mat(compressed: bool, **variables: Any) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, variables, do_compression=compressed)
    return buffer.getvalue()


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _zip(members: dict[str, bytes], compressed: bool = True) -> bytes:
    buffer = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", kind) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name), data, kind)
    return buffer.getvalue()


def _unzip(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


CIFAR_MEMBER = "cifar-10-batches-bin/test_batch.bin"
_RECORDS = writers.cifar_binary(random_bytes(2, 3, 32, 32), np.array([1, 2]))
_DIGITS, _LABELS = writers.idx(random_bytes(3, 28, 28)), writers.idx(random_bytes(3, high=10))
_PICKLE = writers.Python2Pickle().dictionary({b"data": random_bytes(2, 3072), b"labels": [1, 2], b"filenames": [b"a"]})
_PICKLE_100 = writers.Python2Pickle().dictionary(
    {b"data": random_bytes(2, 3072), b"fine_labels": [1, 2], b"coarse_labels": [3, 4]}
)
_RECORDS_100 = writers.cifar_binary(random_bytes(2, 3, 32, 32), np.array([1, 2]), np.array([3, 4]))
_NORB = "smallnorb-5x01235x9x18x6x2x96x96-testing"
_NORB_FILES = {
    "dat": writers.norb(random_bytes(2, 2, 96, 96)),
    "cat": writers.norb(np.array([1, 2], np.int32)),
    "info": writers.norb(np.array([[4, 0, 0, 0], [4, 1, 2, 5]], np.int32)),
}
_AFFNIST = {"image": random_bytes(1600, 2), "label_int": np.array([1, 2])}
_SVHN = {"X": random_bytes(32, 32, 3, 2), "y": np.array([[1], [2]])}


def _mnist_samples() -> Iterator[Sample]:
    plain = {"mnist/t10k-images-idx3-ubyte": _DIGITS, "mnist/t10k-labels-idx1-ubyte": _LABELS}
    zipped = {f"{path}.gz": _compress(data) for path, data in plain.items()}
    for path in plain:
        kind = "images" if "images" in path else "labels"
        yield Sample(f"idx-{kind}", path, plain, _tensors("mnist"))
        yield Sample(f"idx-{kind}-gzipped", f"{path}.gz", zipped, _tensors("mnist"), detects=True)
        yield Sample(f"idx-{kind}-in-gzip", f"{path}.gz", {**zipped, f"{path}.gz": plain[path]}, _tensors("mnist"),
                     detects=True, wrap=_compress)  # fmt: skip


def _cifar_samples() -> Iterator[Sample]:
    for name, path, data, options in (
        ("cifar10", f"cifar10/{CIFAR_MEMBER}", _RECORDS, {}),
        ("cifar10", "cifar10/cifar-10-batches-py/test_batch", _PICKLE, {"file_format": "python"}),
        ("cifar100", "cifar100/cifar-100-binary/test.bin", _RECORDS_100, {}),
        ("cifar100", "cifar100/cifar-100-python/test", _PICKLE_100, {"file_format": "python"}),
    ):
        kind = "pickle" if options else "binary"
        yield Sample(
            f"{name}-{kind}", path, {path: data}, _tensors(name, **options), detects=True, is_pickle=bool(options)
        )
    archive, load = "cifar10/cifar-10-binary.tar.gz", _tensors("cifar10")
    content = _tar({CIFAR_MEMBER: _RECORDS, "cifar-10-batches-bin/readme.html": b"<html>"})
    yield Sample("tar.gz", archive, {archive: _compress(content)}, load, detects=True)
    yield Sample("tar", archive, {archive: content}, load, detects=True, wrap=_compress)

    def extract(root: Path) -> list[Tensor]:
        """Without published checksums."""
        extract_member(root / "made.tar.gz", root / "new", CIFAR_MEMBER)
        return [Tensor(list((root / "new" / CIFAR_MEMBER).read_bytes()))]

    yield Sample("tar.gz-without-checksums", "made.tar.gz", {"made.tar.gz": _compress(content)}, extract, detects=True)


def _mat_samples() -> Iterator[Sample]:
    for compressed in (False, True):
        ending = "-compressed" if compressed else ""
        path, data = "svhn/test_32x32.mat", _mat(compressed, **_SVHN)
        yield Sample(f"svhn-mat{ending}", path, {path: data}, _tensors("svhn"), detects=True, weight=3)
        path, data = "affnist/test.mat", _mat(compressed, affNISTdata=_AFFNIST)
        yield Sample(f"affnist-mat{ending}", path, {path: data}, _tensors("affnist"), weight=3)
    path, record = "affnist/test.mat.zip", "affnist/test.mat.zip.sha256"
    data = _zip({"test.mat": _mat(False, affNISTdata=_AFFNIST)})
    yield Sample("affnist-zip", path, {path: data}, _tensors("affnist"), detects=True, weight=3)
    checksum = f"{hashlib.sha256(data).hexdigest()}  test.mat.zip\n".encode()
    yield Sample("affnist-zip-recorded", path, {path: data, record: checksum}, _tensors("affnist"), detects=True)


def _norb_samples() -> Iterator[Sample]:
    for compressed in (False, True):
        ending = ".gz" if compressed else ""
        files = {
            f"smallnorb/{_NORB}-{kind}.mat{ending}": _compress(data) if compressed else data
            for kind, data in _NORB_FILES.items()
        }
        for path in files:
            kind = path.rpartition("-")[2]
            yield Sample(f"smallnorb-{kind}", path, files, _tensors("smallnorb"), detects=compressed, weight=3)


def _image_samples() -> Iterator[Sample]:
    pixels = random_bytes(20, 30, 3)
    modes = {"png": "RGB", "jpg": "RGB", "gif": "P", "bmp": "RGB", "tiff": "RGBA", "webp": "RGB", "ppm": "RGB",
             "pgm": "L"}  # fmt: skip
    for suffix, mode in modes.items():
        buffer = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(buffer, {"jpg": "jpeg", "pgm": "ppm"}.get(suffix, suffix))
        files = {f"{name}/{number}.{suffix}": buffer.getvalue() for name in "ab" for number in range(2)}
        options = {"val_fraction": 0, "test_fraction": 0, "cache": False}
        yield Sample(f"folder-{suffix}", f"a/0.{suffix}", files, _tensors("folder", **options), weight=1)

        def read(root: Path, path: str = f"a/0.{suffix}") -> list[Tensor]:
            try:
                return [read_image(root / path, ImageFormat((8, 8), 1, "pad"))]
            except Exception as error:  # `predict` turns every error into a DataError that names the file
                raise images.DataError(f"{root / path}: {' '.join(str(error).split())}") from error

        yield Sample(f"image-{suffix}", f"a/0.{suffix}", files, read, weight=4)


def _cache_samples() -> Iterator[Sample]:
    """The cache of decoded images: a damaged one is ignored, so that the images are decoded again."""
    buffer = io.BytesIO()
    pixels, indices = Tensor(random_bytes(4, 1, 8, 8)).byte(), Tensor([0, 1, 2, 3]).long()
    content = {"images": pixels, "indices": indices, "sha256": images._cache_digest(pixels, indices)}
    images.torch.save(content, buffer)

    def load(root: Path) -> list[Tensor]:
        cached = images._read_cache(root / "cache.pt", 4, ImageFormat((8, 8), 1, "pad"))
        return [pixels, indices] if cached is None else list(cached)

    yield Sample("image-cache", "cache.pt", {"cache.pt": buffer.getvalue()}, load, detects=True)
    members = _unzip(buffer.getvalue())
    name = next(name for name in members if name.endswith("data.pkl"))

    def wrap(data: bytes) -> bytes:
        """With valid checksums of the archive."""
        return _zip({**members, name: data}, compressed=False)

    yield Sample("image-cache-pickle", "cache.pt", {"cache.pt": members[name]}, load, detects=True, wrap=wrap,
                 is_pickle=True)  # fmt: skip


def list_samples() -> list[Sample]:
    """Return a sample of each reader; the names are unique."""
    groups = (_mnist_samples, _cifar_samples, _mat_samples, _norb_samples, _image_samples, _cache_samples)
    return [sample for group in groups for sample in group()]


@contextlib.contextmanager
def published(sample: Sample) -> Iterator[None]:
    """Make the checksums and the number of images of a sample the published ones."""
    contents = {f"x/{CIFAR_MEMBER}": _RECORDS, **sample.files}  # also for the archives
    contents[sample.target] = sample.wrap(contents[sample.target])
    md5 = {
        path.rpartition("/")[2]: hashlib.md5(data, usedforsecurity=False).hexdigest() for path, data in contents.items()
    }

    def members(spec: Any) -> dict[str, Any]:
        return {
            kind: {
                split: {name: f"md5:{md5.get(name.rpartition('/')[2], '0')}" for name in names}
                for split, names in splits.items()
            }
            for kind, splits in spec.members.items()
        }

    with contextlib.ExitStack() as stack:
        for spec in (CIFAR10, CIFAR100):
            stack.enter_context(mock.patch.object(spec, "members", members(spec)))
        for spec in (MNIST, SVHN):
            checksums = {name: (md5.get(name, "0"), size) for name, (_, size) in spec.checksums.items()}
            stack.enter_context(mock.patch.object(spec, "checksums", checksums))
        norb = {split: {name: md5.get(name, "0") for name in names} for split, names in SmallNORB.checksums.items()}
        stack.enter_context(mock.patch.object(SmallNORB, "checksums", norb))
        for spec, count in ((MNIST, 3), (CIFAR10, 2), (CIFAR100, 2), (SVHN, 2), (AffNIST, 2), (SmallNORB, 2)):
            stack.enter_context(mock.patch.object(spec, "split_sizes", {"train": count, "val": count, "test": count}))
        yield
