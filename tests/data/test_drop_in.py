"""A data set that is added as one file is found, usable by name in Python and on the command line, and tested."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DATASET = '''
"""Bars: horizontal and vertical bars."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.registry import register_dataset


@dataclass(frozen=True)
class Bars(DataSpec):
    """Horizontal and vertical bars on a square canvas.

    Args:
        brightness: gray level of the bars.
    """

    title: ClassVar[str] = "horizontal and vertical bars"
    shape: ClassVar[ImageShape | None] = (1, 28, 28)
    n_classes: ClassVar[int | None] = 2

    brightness: int = 200

    def load(self, request: LoadRequest) -> Dataset:
        images = torch.zeros(48, 1, 28, 28, dtype=torch.uint8)
        for index in range(48):
            (images[index, 0] if index % 2 else images[index, 0].T)[index // 2 : index // 2 + 3] = self.brightness
        return ImageSet(request.name, request.split, images, torch.arange(48) % 2, ["vertical", "horizontal"])


register_dataset("bars", Bars())
'''

SCRIPT = """
import sys
import pytest
import torchcaps
from torchcaps.cli import main
from torchcaps.training import run

run.draw_run = lambda *_: []  # drawing takes longer than everything else
assert torchcaps.__file__.startswith(sys.argv[1]), torchcaps.__file__
assert "bars" in torchcaps.list_datasets()
assert int(torchcaps.create_dataset("bars", "test", brightness=90).get_batch(torch.arange(4)).images.max()) == 90
main(["data", "list"])
main(["data", "check", "bars"])
main(["data", "sample", "bars", "--brightness", "90", "--out", "grid.png"])
main(["train", "capsnet_small", "--data", "bars", "--steps", "2", "--batch-size", "16", "--out", "run", "--width", "4"])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "bars", "tests/data/test_datasets.py"]))
"""


def test_one_file_adds_a_data_set(tmp_path: Path) -> None:
    """In a copy of the package, in one process: Python, command line, training and the tests of every data set."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torchcaps", tmp_path / "torchcaps", ignore=ignore)
    shutil.copytree(ROOT / "tests/data", tmp_path / "tests/data", ignore=ignore)
    for path in [*(ROOT / "tests").glob("*.py")]:
        shutil.copy(path, tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "torchcaps/data/datasets/bars.py").write_text(DATASET)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", "import torch\n" + SCRIPT, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "horizontal and vertical bars" in result.stdout
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "run").is_dir()
    summary = result.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "failed" not in summary
