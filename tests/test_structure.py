"""The shape of the project: what may import what, what everything costs at the door, what nobody tests."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import torchcaps
import torchcaps.analysis
import torchcaps.papers
import torchcaps.training

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchcaps"
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "torchcaps."))

# A package imports only packages to its left; siblings of one set do not import each other.
LAYERS = [
    {"torchcaps._core"},
    {"torchcaps.functional"},
    {"torchcaps.capsules"},
    {"torchcaps.votes"},
    {"torchcaps.routing"},
    {"torchcaps.nn", "torchcaps.losses", "torchcaps.metrics"},
    {"torchcaps.data", "torchcaps.models"},
    {"torchcaps.profiling"},
    {"torchcaps"},
    {"torchcaps.analysis"},
    {"torchcaps.training"},
    {"torchcaps.bench"},
    {"torchcaps.reproduce"},
    {"torchcaps.papers"},
    {"torchcaps.cli"},
    {"torchcaps.__main__"},
][::-1]
# What needs more than torch, and says so when it is missing.
EXTRAS = {"torchcaps.cli": {"jsonargparse", "rich", "yaml"}}  # the others import theirs when they need them


def part_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            known = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            names |= known or {node.module}
    return names


@pytest.mark.parametrize("module", ["torchcaps", *MODULES])
def test_imports_point_down_and_need_torch_alone(module: str) -> None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    own = part_of(module)
    (level,) = [n for n, layer in enumerate(LAYERS) if own in layer]
    allowed = {own} | {part for layer in LAYERS[level + 1 :] for part in layer}
    for name in imported(path):
        top = name.split(".")[0]
        if top == "torchcaps":
            assert part_of(name) in allowed, f"{module} imports {name}"
        else:
            known = {"torch"} | sys.stdlib_module_names | EXTRAS.get(own, set())
            assert top in known, f"{module} imports {name}"


def test_import_loads_nothing_but_torch() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import torchcaps;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(run.stdout.split()) - sys.stdlib_module_names <= {"torch", "torchcaps"}


def test_import_costs_little_more_than_torch() -> None:
    """At most a quarter more: the least of several interleaved runs."""
    least = {"torch": float("inf"), "torchcaps": float("inf")}
    for _ in range(3):
        for name in least:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, cwd=ROOT)
            least[name] = min(least[name], time.perf_counter() - start)
    assert least["torchcaps"] <= 1.25 * least["torch"]


@pytest.mark.parametrize("module", ["torchcaps", *MODULES])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_examples_of_the_readme_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_readme_names_every_routing() -> None:
    """Those that the package imports by name: a file that was only dropped in needs no other edit."""
    text = (ROOT / "README.md").read_text()
    public = [getattr(torchcaps.routing, name) for name in torchcaps.routing.__all__]
    routings = [x for x in public if isinstance(x, type) and issubclass(x, torchcaps.routing.Routing)]
    assert len(routings) == 8
    for routing in routings:
        assert f"`{routing.__name__}`" in text or routing is torchcaps.routing.Routing


def test_the_example_routing_of_contributing_works() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    script = f"import torch, torchcaps\nif 'normed' not in torchcaps.list_routings():\n    exec({block!r})\n"
    script += "print(torchcaps.route(torch.randn(2, 6, 3, 4), 'normed').length().allclose(torch.tensor(1.0)))\n"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "True\n"


def test_every_public_name_is_used_by_a_test() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    used: set[str] = set()
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    packages = (
        torchcaps,
        torchcaps.analysis,
        torchcaps.data,
        torchcaps.nn,
        torchcaps.routing,
        torchcaps.losses,
        torchcaps.metrics,
        torchcaps.models,
        torchcaps.papers,
        torchcaps.training,
        torchcaps.votes,
    )
    public = {
        name for package in packages for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)
    }
    assert public - used == set()


def test_every_trap_has_its_named_test() -> None:
    wanted = set(range(1, 53))
    named: set[int] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"def (test_trap_\w+)", path.read_text()):
            named |= {int(number) for number in re.findall(r"_(\d\d)(?=_)", name)}
    assert wanted - named == set()
