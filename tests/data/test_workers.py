"""Data workers: forked by a process without threads, without inherited files, ended with their parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import assert_bit_equal
from torchcaps.data import Batch, Dataset, ImageSet, Loader, create_dataset
from torchcaps.data import workers as data_workers
from torchcaps.data.workers import worker_context
from torchcaps.training.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other platforms use multiprocessing's default")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def random_images(count: int = 24) -> ImageSet:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 1, 4, 4), np.uint8))
    return ImageSet("random", "train", pixels, torch.arange(count) % 3, "abc", {"angle": torch.arange(count)})


def unpicklable(images: ImageSet) -> Dataset:
    """A data set of a class that a worker can't import."""

    class Local(Dataset):
        def __len__(self) -> int:
            return len(images)

        def get_batch(self, indices: torch.Tensor, epoch: int = 0) -> Batch:
            return images.get_batch(indices, epoch)

    return Local("local", "train", images.shape, images.classes)


def test_server_has_one_thread_and_workers_inherit_no_file(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        batches = Loader(random_images(), 4, num_workers=2).epoch(0)
        next(batches)
        next(batches)  # of the second worker, which has started now, too
        server = data_workers._get_server()._forkserver_pid  # type: ignore[attr-defined]
        assert server is not None
        assert len(os.listdir(f"/proc/{server}/task")) == 1, "the server must not fork with threads"
        assert os.getpgid(server) == server, "the server would get the signals of the training process"
        pids = children(server)
        assert len(pids) == 2
        assert set(pids).isdisjoint(children(os.getpid()))
        for pid in pids:
            opened = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            assert file.name not in opened
            assert os.getpgid(pid) == pid
    del batches


@pytest.mark.parametrize("convert", [lambda images: images, unpicklable, lambda images: images.subset([3, 1, 2, 0])])
def test_batches_are_those_of_one_process(convert: Callable[[ImageSet], Dataset]) -> None:
    dataset = convert(random_images())
    single, several = (list(Loader(dataset, 3, num_workers=workers).epoch(2)) for workers in (0, 2))
    for batch, expected in zip(several, single, strict=True):
        for actual, tensor in zip(batch, expected, strict=True):
            assert_bit_equal(actual, tensor)


def test_tensors_are_shared_once_and_views_stay_valid() -> None:
    dataset = random_images()
    original, view = dataset.images, dataset.images.numpy()
    copy = view.copy()
    assert worker_context(dataset, dataset) is not None
    assert dataset.images.is_shared()
    assert dataset.metadata["angle"].is_shared()
    assert not original.is_shared()
    np.testing.assert_array_equal(view, copy)
    assert_bit_equal(dataset.images, original)
    address = dataset.images.data_ptr()
    assert worker_context(dataset, dataset) is not None
    assert dataset.images.data_ptr() == address
    pairs = create_dataset("multimnist", "test", source="digits")
    assert worker_context(pairs, pairs) is not None
    (digits,) = (value for value in vars(pairs).values() if isinstance(value, ImageSet))
    assert digits.images.is_shared()


def test_workers_are_forked_by_default_if_data_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    local = unpicklable(random_images())
    assert worker_context(local, local) is None
    dataset = random_images()
    main_class = type("Mine", (ImageSet,), {"__module__": "__main__"})
    mine = main_class("mine", "train", dataset.images, dataset.labels, dataset.classes)
    monkeypatch.setattr(sys.modules["__main__"], "Mine", main_class, raising=False)
    assert worker_context(mine, mine) is None
    many = random_images()
    many.metadata = {str(number): torch.zeros(24) for number in range(200)}
    assert worker_context(many, many) is None
    monkeypatch.setattr(data_workers, "SHARED_FRACTION", 0)
    assert worker_context(dataset, dataset) is None
    assert not dataset.images.is_shared()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.data.test_workers import random_images, unpicklable
from torchcaps.data import Loader
from torchcaps.training.run_dir import RunDirectory

directory = RunDirectory.create(sys.argv[1], "run")
loaders = [Loader(data, 2, num_workers=1).epoch(0) for data in (random_images(), unpicklable(random_images()))]
for loader in loaders:
    next(loader)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_leaves_neither_lock_nor_workers(tmp_path: Path) -> None:
    """Workers of both kinds, forked by the server and by the process itself."""
    path = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.wait() == -signal.SIGKILL, process.communicate()[1]
    directory = RunDirectory(path)
    directory.lock()
    directory.release()
    assert process.communicate(timeout=850) == ("", "")  # returns if no process has its pipes open
