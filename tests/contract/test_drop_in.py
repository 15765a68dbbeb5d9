"""A routing that is dropped into the package as one file is found, usable by name, and held to the contract."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

ROUTING = '''
"""The mean vote, scaled."""

from dataclasses import dataclass

from torchcaps.functional import squash
from torchcaps.routing.base import Coefficient, Routing, State


@dataclass(frozen=True)
class DropIn(Routing):
    """Equal couplings and a learned gain for each parent."""

    paper = "nobody 2026"
    equation = "eq. 0"

    gain: bool = True

    def coefficients(self, geometry):
        return {"gain": Coefficient(("J",), 1.0)} if self.gain else {}

    def step(self, coefficients, votes, children, state, t):
        coupling = votes.uniform(children.pose)
        total = votes.sum(coupling)
        if self.gain:
            total = total * coefficients["gain"].unsqueeze(-1)
        return State(pose=squash(total), coupling=coupling)
'''

BATCH_MEAN = ROUTING.replace("return State(", "total = total - total.mean(0, keepdim=True)\n        return State(")

LOOPS = """
from .arithmetic import squash, weighted_sum
from .sites import Parents


def route(sites, p, gain):
    result = []
    for site in sites:
        n_parents = len(site.votes[0])
        coupling = [[1 / n_parents] * n_parents for _ in site.votes]
        total = weighted_sum(site, coupling)
        if gain:
            total = [[p["gain"][j] * x for x in total[j]] for j in range(n_parents)]
        result.append(Parents([squash(s) for s in total], None, coupling))
    return result
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the package and its contract suite."""
    for folder in ("torchcaps", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "torchcaps/routing/drop_in.py").write_text(ROUTING)
    return tmp_path


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(project)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def contract(project: Path, *which: str) -> subprocess.CompletedProcess[str]:
    """Run what the contract suite, or a part of it, has for the new routing."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "drop_in and not test_drop_in")
    return python(project, "-m", "pytest", *(f"tests/contract/{part}" for part in which or ("",)), *options)


def test_one_file_is_all_it_takes(project: Path) -> None:
    script = (
        "import torch, torchcaps; from torchcaps.routing import DropIn;"
        "print(torchcaps.__file__, 'drop_in' in torchcaps.list_routings(),"
        "torchcaps.nn.ConvCapsules(2, 4, 3, 4, 3, routing='drop_in')(torch.rand(1, 4, 4, 2, 4)).pose.shape)"
    )
    found = python(project, "-c", script)
    assert str(project) in found.stdout, found.stderr
    assert "True torch.Size([1, 2, 2, 3, 4])" in found.stdout
    proofless = contract(project, "test_reference.py::test_every_routing_has_its_loops")
    assert "No module named 'tests.reference.drop_in'" in proofless.stdout  # it asks for the proof
    (project / "tests/reference/drop_in.py").write_text(LOOPS)
    whole = contract(project)
    assert whole.returncode == 0, whole.stdout[-3000:]
    n_passed = int(whole.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert n_passed > 300


def test_a_wrong_routing_does_not_pass(project: Path) -> None:
    (project / "torchcaps/routing/drop_in.py").write_text(BATCH_MEAN)
    result = contract(project, "test_symmetry.py")
    assert result.returncode == 1
    assert "test_an_image_does_not_depend_on_its_batch[drop_in-dense-vector]" in result.stdout
