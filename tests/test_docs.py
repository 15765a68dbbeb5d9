"""Documents: examples run, commands parse, links exist, generated files equal their source."""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

import torchcaps
from tests.sampling import all_cases, sample
from torchcaps.cli import main
from torchcaps.cli.main import COMMANDS
from torchcaps.cli.parser import Parser
from torchcaps.routing import ROUTINGS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted(path.name for path in (ROOT / "examples").glob("[0-9]*.py"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def load_tool(path: str) -> ModuleType:
    """Import a file of tools/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"tool_{Path(path).stem}", ROOT / "tools" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


# Python ---------------------------------------------------------------------------------------------------------------

PYTHON = [(document, n) for document in DOCUMENTS for n in range(len(blocks(document, "python")))]


@pytest.mark.parametrize(("document", "index"), sample(PYTHON, 6))
def test_python_examples_run(document: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some examples train
    with ROUTINGS.restored(), contextlib.redirect_stdout(io.StringIO()):
        module = ModuleType("example")  # dataclasses look their module up
        monkeypatch.setitem(sys.modules, "example", module)
        exec(compile(blocks(document, "python")[index], f"{document}, example {index}", "exec"), vars(module))


def test_python_examples_are_complete() -> None:
    """Every example parses and imports what it uses, so that it can be copied."""
    for document, index in PYTHON:
        tree = ast.parse(blocks(document, "python")[index])
        assert any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body), (document, index)


@pytest.mark.skipif(not all_cases(), reason="each takes some seconds: runs with --all-cases")
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorials_run(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=850)
    assert result.returncode == 0, result.stderr
    script = (ROOT / "examples" / name).read_text()
    for picture in re.findall(r"images/tutorials/(\S+\.png)", script):
        assert (tmp_path / picture).exists()
        assert (ROOT / "docs/images/tutorials" / picture).exists()


# Shell ----------------------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """A command has parsed its arguments."""


def commands(document: str) -> list[list[str]]:
    """Return the arguments of every ``torchcaps`` command in the shell blocks of a document."""
    found = []
    for block in blocks(document, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r'eval "\$\((.*?)\)"', r"\1", line)
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "variable", line), comments=True)
            words = words[: next((n for n, word in enumerate(words) if word in (">", "&", "|")), len(words))]
            starts = [n for n, word in enumerate(words) if Path(word).name == "torchcaps"]
            if starts and (starts[0] == 0 or words[0] in ("nohup", "torchrun", "srun")):
                found.append(words[starts[0] + 1 :])
    return found


def exception_of(arguments: list[str]) -> BaseException | None:
    try:
        main(arguments)
    except (Parsed, SystemExit) as error:
        return error
    return None


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that commands of the documents name."""
    root = tmp_path_factory.mktemp("documents")
    for name in ("capsnet_digits-digits-1", "a", "b", "mine", "capsnet_images-my_images-1"):
        shutil.copytree(ROOT / "results/runs/capsnet_digits-0", root / "runs" / name)
    for name in ("cat", "dog"):
        (root / "my_images" / name).mkdir(parents=True)
        for index in range(10):
            Image.new("RGB", (8, 8)).save(root / "my_images" / name / f"{index}.png")
    for name in ("more_images", "new_images"):
        shutil.copytree(root / "my_images", root / name)
    for name in ("photo.jpg", "capsnet.h5", "model.onnx"):
        (root / name).write_bytes(b"")
    shutil.copytree(root / "runs/a", root / "variable/tsai")
    return root


def test_commands_parse(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the documents is accepted by the parser of the command line."""
    original = Parser.parse

    def parse(self: Parser, arguments: Any) -> Any:
        original(self, arguments)
        raise Parsed

    monkeypatch.setattr(Parser, "parse", parse)
    monkeypatch.chdir(workspace)
    named = set()
    for document in DOCUMENTS:
        for arguments in commands(document):
            stderr = io.StringIO()
            with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
                error = exception_of(arguments)
            if isinstance(error, Parsed):
                named.add(arguments[0])
            elif not isinstance(error, SystemExit) or error.code != 0:
                pytest.fail(f"{document}: torchcaps {shlex.join(arguments)}: {error!r} {stderr.getvalue()}")
    assert set(COMMANDS) - named == set()  # every command has an example


# Links and generated files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files(document: str) -> None:
    """`make docs` checks anchors too, and links to generated pages."""
    generated = ("reference/api/", "reference/commands.md", "reference/configuration.md", "tutorials/")
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    for link in LINK.findall(text):
        target = (ROOT / document).parent / link.partition("#")[0]
        path = os.path.relpath(target, ROOT / "docs")
        if not re.match(r"[a-z]+:", link) and not path.startswith(generated):
            assert target.exists(), f"{document}: {link}"


def test_navigation_has_every_document() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for document in DOCUMENTS[1:]:
        assert f" {document.removeprefix('docs/')}\n" in text, document
    for name in TUTORIALS:
        assert f"tutorials/{Path(name).stem}.md" in text


def test_public_names_are_those_of_the_inventory() -> None:
    reference = load_tool("site/reference.py")
    listed = reference.INVENTORY.read_text().splitlines()
    remedy = "a public name was added or removed: see docs/versioning.md, then run python tools/site/reference.py"
    assert listed == reference.inventory(), remedy


def test_architecture_shows_the_present_imports() -> None:
    graph = load_tool("import_graph.py")
    assert graph.OUT.read_text() == graph.render(), "imports have changed: run python tools/import_graph.py"


def test_every_routing_has_a_page_with_its_record() -> None:
    record = json.loads((ROOT / "docs/images/routings/record.json").read_text())
    directory = ROOT / "docs/understand/routings"
    overview = (directory / "index.md").read_text()
    exported = {
        cls.__name__ for cls in map(torchcaps.routing.__dict__.get, torchcaps.routing.__all__) if isinstance(cls, type)
    }
    names = [name for name in ROUTINGS if ROUTINGS.get(name).__name__ in exported]
    for name in names:
        text = (directory / f"{name}.md").read_text()
        assert [part for part in ("## Idea", "## Equation", "## Cost", "## When to use it") if part not in text] == []
        assert (ROOT / f"docs/images/routings/{name}.png").exists()
        accuracy = f"{100 * record[name]['accuracy']:.1f} %"
        assert f"correct for {accuracy}" in " ".join(text.split())
        assert re.search(rf"\({name}\.md\).* {re.escape(accuracy)} \|", overview)


def test_reference_describes_every_key_and_command() -> None:
    reference = load_tool("site/reference.py")
    keys, text = reference.configuration_page(), reference.commands_page()
    for key in torchcaps.training.RunSpec.of().to_plain():
        (row,) = re.findall(rf"^\| `{key}` \|.*\| (.*) \|$", keys, re.MULTILINE)
        assert row, f"{key} has no description"
    assert [command for command in COMMANDS if f"## torchcaps {command}" not in text] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@pytest.mark.parametrize(
    ("maps", "middle", "expected"),
    [
        ([0.0, 0.8, 5.9], 0.8, (0.0, 5.9)),  # normalised couplings are not negative: no colour below 0 on the bar
        ([7.99, 8.0, 8.25], 8.0, (7.75, 8.25)),
        ([-0.5, 0.0, 0.25], 0.0, (-0.5, 0.25)),
    ],
)
def test_colour_bar_has_possible_couplings_only(
    maps: list[float], middle: float, expected: tuple[float, float]
) -> None:
    values = torch.tensor(maps)
    limits = load_tool("routing_figures.py").bar_limits(values, middle, float((values - middle).abs().max()))
    assert limits == pytest.approx(expected)
