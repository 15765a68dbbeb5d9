"""A routing added as a single file is registered, usable by name, and tested by the contract suite."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

ROUTING = '''
"""Scaled mean of the votes."""

from dataclasses import dataclass

from torchcaps.functional import squash
from torchcaps.routing.base import Coefficient, Routing, State


@dataclass(frozen=True)
class DropIn(Routing):
    """Uniform couplings and a learned gain for each parent."""

    paper = "an example"
    equation = "none"

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

# A bug: images of a batch depend on each other.
ROUTING_WITH_BATCH_MEAN = ROUTING.replace(
    "return State(", "total = total - total.mean(0, keepdim=True)\n        return State("
)

REFERENCE = """
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

# Tests of the contract suite that must have run for a new routing.
CONTRACT_TESTS = {
    "test_every_routing_has_reference_loops",
    "test_values_equal_reference",
    "test_gradients_equal_finite_differences_of_reference",
    "test_values_and_gradients_are_finite",
    "test_image_is_independent_of_its_batch",
    "test_parents_are_invariant_to_the_order_of_children",
    "test_permuted_weights_permute_parents",
    "test_couplings_sum_to_one_over_the_axis_of_the_paper_only",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the package and the tests, and add a routing file."""
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


def run_contract_tests(project: Path, *files: str) -> subprocess.CompletedProcess[str]:
    """Run the contract tests of the new routing, in all files or some of them."""
    options = ("-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "drop_in and not test_drop_in")
    return python(project, "-m", "pytest", *(f"tests/contract/{file}" for file in files or ("",)), *options)


def test_one_file_adds_a_routing(project: Path) -> None:
    script = (
        "import torch, torchcaps; from torchcaps.routing import DropIn;"
        "print(torchcaps.__file__, 'drop_in' in torchcaps.list_routings(),"
        "*torchcaps.nn.ConvCapsules(2, 4, 3, 4, 3, routing='drop_in')(torch.rand(1, 4, 4, 2, 4)).pose.shape)"
    )
    run = python(project, "-c", script)
    assert run.stdout.split() == [str(project / "torchcaps/__init__.py"), "True", "1", "2", "2", "3", "4"], run.stderr
    (project / "tests/reference/drop_in.py").write_text(REFERENCE)
    run = run_contract_tests(project)
    assert run.returncode == 0, run.stdout[-3000:]
    passed = set(re.findall(r"::(test_\w+)\[drop_in\S* PASSED", run.stdout))
    assert passed >= CONTRACT_TESTS, f"not run: {sorted(CONTRACT_TESTS - passed)}"


def test_routing_with_a_bug_or_without_reference_fails(project: Path) -> None:
    (project / "torchcaps/routing/drop_in.py").write_text(ROUTING_WITH_BATCH_MEAN)
    run = run_contract_tests(project, "test_symmetry.py", "test_reference.py::test_every_routing_has_reference_loops")
    assert run.returncode == 1, run.stdout[-3000:]
    failed = set(re.findall(r"^FAILED \S+::(test_\w+)\[drop_in", run.stdout, re.MULTILINE))
    assert failed >= {"test_image_is_independent_of_its_batch", "test_every_routing_has_reference_loops"}
