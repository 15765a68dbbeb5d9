"""A model added as one file to ``torchcaps/models`` works by name, from the command line and under the model tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "dropin2026_digits"

MODEL = '''
"""A network of one convolution and two capsule layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import Dynamic, Routing


@dataclass(frozen=True, kw_only=True)
class DropIn2026(CapsuleSpec):
    """A small network: no paper."""

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "hidden": (16,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = Dynamic(2)
    reconstruction: bool = True
    hidden: tuple[int, ...] = (64,)
    width: int = 64

    def build_network(self) -> CapsuleNetwork:
        layers = self.new_layers()
        layers.conv("conv1", self.width, 5, stride=2)
        layers.relu()
        layers.primary(4, 8, 3, stride=2)
        layers.dense_capsules("classes", self.classes, 8, routing=self.effective_routing)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        return Recipe(self.adapt_loss(LossConfig()), batch_size=32, steps=100)


register_model("dropin2026_digits", DropIn2026(), "0.14M", n_parameters=140_272, data="digits")
'''

USE = f"""
import sys
import torch, torchcaps
from torchcaps.cli.main import main
from torchcaps.models import DropIn2026

model = torchcaps.create_model("{NAME}", classes=3)
print(torchcaps.__file__, type(model.spec) is DropIn2026, torchcaps.list_models("dropin*"))
print("scores", list(model(torch.rand(2, 1, 28, 28)).scores.shape))
main(["show", "{NAME}"])
main(["train", "{NAME}", "--steps", "1", "--max-train-images", "64", "--max-test-images", "32", "--out", "run"])
"""

SUITE = f"""
import sys
import pytest
from tests.models.write_tables import main

main()
sys.exit(pytest.main(["tests/models", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "{NAME}"]))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and the tests with one more model."""
    path = tmp_path_factory.mktemp("project")
    for folder in ("torchcaps", "tests"):
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", path)
    (path / "torchcaps/models/dropin2026.py").write_text(MODEL)
    return path


def python(project: Path, script: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "TORCHCAPS_ALL_CASES": "1"}
    return subprocess.run([sys.executable, "-c", script], cwd=project, env=environment, capture_output=True, text=True)


def test_one_file_is_enough_for_python_and_the_command_line(project: Path) -> None:
    result = python(project, USE)
    assert result.returncode == 0, result.stderr[-3000:]
    first, second, *shown = result.stdout.splitlines()
    assert first == f"{project / 'torchcaps' / '__init__.py'} True ['{NAME}']"
    assert second == "scores [2, 3]"
    assert "conv1" in {line.split()[0] for line in shown if line.strip()}
    assert (project / "run").is_dir()


def test_the_model_tests_cover_it(project: Path) -> None:
    result = python(project, SUITE)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    n_passed = int(result.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    tests = {line.partition("::")[2].partition("[")[0] for line in result.stdout.splitlines() if "::" in line}
    assert n_passed >= 15, tests
