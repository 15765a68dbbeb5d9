"""Structure of the project: layers, imports, module sizes, examples in docstrings, tested names."""

import ast
import contextlib
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchcaps
from tests.sampling import sample
from torchcaps._core.registry import Registry
from torchcaps.models import MODELS, ModelSpec
from torchcaps.routing import ROUTINGS, Routing, create_routing

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchcaps"
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "torchcaps."))
MAX_LINES = 400

# A package imports only packages of earlier rows. Packages in one row do not import each other. Packages that do not
# exist yet are listed, so that adding them needs no edit here.
LAYERS = [
    ["_core"],
    ["functional"],
    ["capsules"],
    ["votes"],
    ["routing"],
    ["nn", "losses", "metrics"],
    ["data", "models"],
    ["profiling"],
    ["analysis"],
    ["training"],
    ["bench", "export", "audit", "lightning", "hub"],
    ["reproduce"],
    ["papers"],
    ["explorer"],
    ["cli"],
    ["__main__"],
]
LEVELS = {f"torchcaps.{name}": level for level, names in enumerate(LAYERS) for name in names}
LEVELS["torchcaps"] = len(LAYERS)  # the lazy public names: may refer to everything, imported by nothing
TRITON_MODULES = {f"torchcaps.votes.triton.{name}" for name in ("kernels", "support", "tiles")}
IMPORTED_BY_NOTHING = {"torchcaps.lightning", "torchcaps.hub"}  # optional extras

# Packages besides torch and the standard library that may be imported at module level. All other optional dependencies
# are imported by `torchcaps._core.optional.import_optional` on first use.
EXTRAS = {
    "torchcaps.cli": {"jsonargparse", "rich", "yaml"},
    "torchcaps.explorer": {"fastapi", "pydantic", "starlette", "uvicorn"},
    "torchcaps.lightning": {"lightning", "torchmetrics"},
    "torchcaps.hub": {"huggingface_hub"},
}


def top_package(module: str) -> str:
    """Return the package of a module below ``torchcaps``: ``torchcaps.nn`` for ``torchcaps.nn.layers``."""
    return ".".join(module.split(".")[:2])


def source_path(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_modules(module: str) -> set[str]:
    """Return the modules that a module imports, anywhere in its source, by absolute name."""
    names = set()
    for node in ast.walk(ast.parse(source_path(module).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            names |= submodules or {node.module}
    return names


@pytest.mark.parametrize("module", ["torchcaps", *MODULES])
def test_imports_follow_the_layers(module: str) -> None:
    package = top_package(module)
    assert package in LEVELS, f"{package} is not in LAYERS"
    for name in sorted(imported_modules(module)):
        other = top_package(name)
        if not name.startswith("torchcaps") or other == package:
            continue
        assert LEVELS[other] < LEVELS[package], f"{module} imports {name}, which is not below it in LAYERS"
        assert other not in IMPORTED_BY_NOTHING or package == "torchcaps", f"{module} imports {name}"


def test_contributing_lists_the_layers() -> None:
    (text,) = re.findall(r"^    (_core <.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    packages = {top_package(module).removeprefix("torchcaps.") for module in MODULES}
    packages -= {"__main__", *(name.removeprefix("torchcaps.") for name in IMPORTED_BY_NOTHING)}
    listed, expected = (
        [present for names in layers if (present := packages & set(names))]
        for layers in ([part.replace("|", " ").split() for part in text.split("<")], LAYERS)
    )
    assert listed == expected


@pytest.mark.parametrize("module", ["torchcaps", *MODULES])
def test_modules_import_only_torch_and_the_standard_library(module: str) -> None:
    allowed = {"torch", "torchcaps", *sys.stdlib_module_names} | EXTRAS.get(top_package(module), set())
    allowed |= {"triton"} if module in TRITON_MODULES else set()
    imported = {name.partition(".")[0] for name in imported_modules(module)}
    assert imported - allowed == set()


def test_import_of_the_package_loads_torch_alone_and_on_demand() -> None:
    """`import torchcaps` loads a handful of modules; the public names need torch and nothing else."""
    script = """
import json, sys
before = set(sys.modules)
import torchcaps
light = set(sys.modules) - before
import torch
with_torch = set(sys.modules)
for name in torchcaps.__all__:
    getattr(torchcaps, name)
print(json.dumps([sorted(light), sorted(set(sys.modules) - with_torch)]))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    light, public = (
        {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
        for names in json.loads(run.stdout)
    )
    assert light == {"torchcaps", "torchcaps._core", "torchcaps._core.version"}
    assert {name.partition(".")[0] for name in public} <= {"torch", "torchcaps"}


def test_functions_and_classes_have_one_meaning() -> None:
    """No two packages define a public function or class of one name; ``main`` is the entry point of a program."""
    owners: dict[str, set[str]] = {}
    for module in MODULES:
        for node in ast.parse(source_path(module).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, set()).add(top_package(module))
    assert {name: sorted(packages) for name, packages in owners.items() if len(packages) > 1 and name != "main"} == {}


@pytest.mark.parametrize("module", ["torchcaps", *MODULES])
def test_modules_are_not_too_long(module: str) -> None:
    n_lines = source_path(module).read_text().count("\n")
    assert n_lines <= MAX_LINES


# Their examples draw figures or export models, which takes a second or more each.
SLOW = [module for module in MODULES if module.startswith(("torchcaps.analysis.", "torchcaps.export."))]


@pytest.mark.parametrize("module", ["torchcaps", *(m for m in MODULES if m not in SLOW), *sample(SLOW, 4, seed=1)])
def test_examples_in_docstrings_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some examples write files
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed, see the captured output"


def test_every_public_class_and_function_has_an_example() -> None:
    """Examples of classes are in the docstring of the class, those of methods are not required."""
    lacking = []
    for line in (ROOT / "docs/reference/public_names.txt").read_text().splitlines():
        package, _, name = line.rpartition(".")
        value = getattr(importlib.import_module(package), name)
        if isinstance(value, type) or inspect.isroutine(inspect.unwrap(value)):
            text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
            if ">>>" not in (text or ""):
                lacking.append(line)
    assert lacking == []


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_readme_names_every_routing() -> None:
    """Every routing that the package exports by name; a file that was only added is discovered without an edit."""
    text = (ROOT / "README.md").read_text()
    exported = [getattr(torchcaps.routing, name) for name in torchcaps.routing.__all__]
    names = [x.__name__ for x in exported if isinstance(x, type) and issubclass(x, Routing) and x is not Routing]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_example_routings_of_contributing_work() -> None:
    blocks = [block for block in python_blocks("CONTRIBUTING.md") if "(Routing)" in block]
    assert blocks != []
    for block in blocks:
        with ROUTINGS.restored():
            before = set(ROUTINGS)
            with contextlib.suppress(ValueError):  # already registered, if the file of the example was added
                exec(compile(block, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
            for name in set(ROUTINGS) - before:
                parents = torchcaps.route(torch.randn(2, 6, 3, 4), create_routing(name))
                assert parents.pose.shape == (2, 3, 4)


def test_every_public_name_is_used_by_a_test() -> None:
    """Registries and classes of registered models are exempt: tests build every registered model by name."""
    used: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name):
                    used.add(node.id)
                elif isinstance(node, ast.Attribute):
                    used.add(node.attr)
    packages = sorted({top_package(module) for module in MODULES} - {"torchcaps._core", "torchcaps.__main__"})
    registered = {type(entry.spec) for entry in MODELS.values()} | {ModelSpec}
    unused = []
    for package in map(importlib.import_module, ["torchcaps", *packages]):
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            exempt = isinstance(value, ModuleType | Registry) or (isinstance(value, type) and value in registered)
            if name not in used and not exempt:
                unused.append(f"{package.__name__}.{name}")
    assert unused == []


def test_every_trap_has_a_named_test() -> None:
    """The traps are numbered in the specification of the papers; a test may cover several."""
    expected = set(range(1, 53))
    covered: set[int] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"def (test_trap_\w+)", path.read_text()):
            covered |= {int(number) for number in re.findall(r"_(\d\d)(?=_)", name)}
    assert sorted(expected - covered) == []
