"""Set-up and tools of the repository."""

import dataclasses
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchcaps
from torchcaps.training import RunSpec, train

ROOT = Path(__file__).resolve().parent.parent


def load_module(path: Path) -> ModuleType:
    """Import a module from a file, without its package."""
    spec = importlib.util.spec_from_file_location(f"tool_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses, which look their module up
    spec.loader.exec_module(module)
    return module


def run_make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "PYTHON"}
    return subprocess.run(["make", *arguments], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the Makefile and its tools, without an environment."""
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_names_an_old_or_missing_python(project: Path) -> None:
    old = project / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.2" && exit 0\nexit 1\n')
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    for python, mention in {str(old): "3.8.2", "python0.0": "'python0.0'"}.items():
        run = run_make(project, "test", f"PYTHON={python}")
        assert run.returncode != 0
        (sentence, *_) = run.stderr.splitlines()
        for text in ("Python 3.11", mention, "make test PYTHON=python3.12"):
            assert text in sentence
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("profile", ["dev", "train"])
def test_setup_runs_again_only_if_a_lock_changed(project: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = load_module(project / "tools/setup.py")
    commands: list[str] = []

    def record(*command: object, **_: object) -> bool:
        commands.append(" ".join(map(str, command)))
        setup.VENV.mkdir(exist_ok=True)
        return True

    monkeypatch.setattr(setup, "run", record)
    monkeypatch.setattr(setup, "pip_setting", lambda name: None)
    setup.main(profile)
    n_commands = len(commands)
    assert [c for c in commands if ".lock" in c and "--require-hashes" not in c] == []
    assert [c for c in commands if "torch-cpu.lock" in c] != []
    assert [c for c in commands if "torch.lock" in c] == []  # only if there is no CPU build
    assert any("triton.lock" in c for c in commands) == (profile == "dev")
    setup.main(profile)
    assert len(commands) == n_commands
    with (project / "requirements/dev.lock").open("a") as lock:
        lock.write("# another\n")
    setup.main(profile)
    assert len(commands) == 2 * n_commands


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda path: path.stem)
def test_locked_packages_have_versions_and_hashes(lock: Path) -> None:
    text = lock.read_text()
    packages = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert packages != []
    assert [line for line in packages if "==" not in line] == []
    assert text.count("--hash=sha256:") >= len(packages)


def test_locks_contain_the_cpu_build_of_torch() -> None:
    assert (ROOT / "requirements/torch-cpu.lock").read_text().count("torch==2.13.0+cpu") == 1
    triton = [line for line in (ROOT / "requirements/triton.lock").read_text().splitlines() if "==" in line]
    assert [line for line in triton if not line.startswith("triton==")] == []
    assert triton[0] in (ROOT / "requirements/torch.lock").read_text()  # the version that torch requires
    assert "torchvision" not in (ROOT / "requirements/dev.lock").read_text()


def test_layers_tool_lists_every_exact_routing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It compares one layer of each routing with the reference loops."""
    monkeypatch.setattr(sys, "argv", ["layers.py", "--digits", "1"])
    load_module(ROOT / "tools/layers.py").main()
    out = capsys.readouterr().out
    routings = [torchcaps.create_routing(name) for name in torchcaps.list_routings()]
    classes = [type(routing).__name__ for routing in routings if not routing.approximate]
    assert [name for name in classes if name not in out] == []
    assert "…" not in out  # no truncated column


def test_layers_tool_rejects_invalid_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["layers.py", "--digits", "0"])
    with pytest.raises(SystemExit) as raised:
        load_module(ROOT / "tools/layers.py").main()
    assert raised.value.code == 2
    error = capsys.readouterr().err
    for text in ("--digits", "1..100", "got 0"):
        assert text in error


def test_mutations_are_current() -> None:
    """The text that each mutation replaces occurs once, and its tests exist; ``make mutations`` runs them."""
    mutations = load_module(ROOT / "tools/mutations.py").read_mutations()
    assert [mutation.name for mutation in mutations if mutation.is_stale(ROOT)] == []
    missing = []
    for node in {node for mutation in mutations for node in mutation.tests}:
        file, _, name = node.partition("::")
        function = name.partition("[")[0]
        if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text():
            missing.append(node)
    assert missing == []


def test_pretrained_weights_of_a_run(tmp_path: Path) -> None:
    """The tool writes weights and a card with data, accuracy and command."""
    model = torchcaps.create_model("mazzia2021_mnist")
    recipe = dataclasses.replace(model.recipe, data="digits", epochs=None, steps=1)
    limits = {"max_train_images": 32, "max_test_images": 32, "num_threads": 1}
    train(
        RunSpec(model.name, {**model.spec.smoke_changes(), "reconstruction": True}, recipe, **limits),
        tmp_path / "run",
        figures=False,
    )
    tool = load_module(ROOT / "tools" / "pretrained.py")
    tool.main([str(tmp_path / "run"), "--command", "torchcaps train x", "--directory", str(tmp_path / "files")])
    card = (tmp_path / "files" / "mazzia2021_mnist.md").read_text()
    assert "torchcaps train x" in card
    assert "32 test images" in card
    assert "mean squared error" in card
    assert (tmp_path / "files" / "mazzia2021_mnist.safetensors").is_file()
