"""Set-up, tools and benchmark as a person meets them."""

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "PYTHON"}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The Makefile and its tools, without an environment."""
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_old_or_missing_python_is_told_in_one_sentence(project: Path) -> None:
    old = project / "python-of-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.2" && exit 0\nexit 1\n')
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    for python, said in {str(old): "is Python 3.8.2", "python0.0": "there is no 'python0.0' here"}.items():
        run = make(project, "test", f"PYTHON={python}")
        assert run.returncode != 0
        (sentence, *_) = run.stderr.splitlines()
        assert "needs Python 3.11 or newer" in sentence
        assert said in sentence
        assert "make test PYTHON=python3.12" in sentence
    assert not (project / ".venv").exists()


def test_a_second_setup_does_nothing_and_a_changed_lock_does(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = load(project / "tools/setup.py")
    ran: list[str] = []

    def pretend(*command: object, **_: object) -> bool:
        ran.append(" ".join(map(str, command)))
        setup.VENV.mkdir(exist_ok=True)
        return True

    monkeypatch.setattr(setup, "run", pretend)
    monkeypatch.setattr(setup, "pip_setting", lambda name: None)
    setup.main()
    n_commands = len(ran)
    assert all("--require-hashes" in command for command in ran if ".lock" in command)
    assert any("torch-cpu.lock" in command for command in ran)
    assert not any("torch.lock" in command for command in ran)  # only where there is no CPU build
    setup.main()
    assert len(ran) == n_commands
    with (project / "requirements/dev.lock").open("a") as lock:
        lock.write("# another\n")
    setup.main()
    assert len(ran) == 2 * n_commands


def test_every_locked_package_has_hashes_and_torch_its_exact_pin() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        blocks = [block for block in lock.read_text().split("\n") if block and not block.startswith((" ", "#"))]
        text = lock.read_text()
        assert blocks
        assert all("==" in block for block in blocks)
        assert text.count("--hash=sha256:") >= len(blocks)
    assert (ROOT / "requirements/torch-cpu.lock").read_text().count("torch==2.13.0+cpu") == 1
    assert "torchvision" not in (ROOT / "requirements/dev.lock").read_text()


def test_the_layers_of_every_routing_agree_with_the_papers() -> None:
    run = subprocess.run(
        [sys.executable, "tools/layers.py", "--digits", "2"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in ("Uniform", "Dynamic", "EM", "InvertedAttention", "Attention", "Trainable", "Quadratic"):
        assert name in run.stdout
    assert "…" not in run.stdout
    refused = subprocess.run(
        [sys.executable, "tools/layers.py", "--digits", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "--digits must lie in 1..100" in refused.stderr


def test_the_recorded_training_memory_is_the_readmes() -> None:
    """And the estimates are where the README says: most of them within a quarter of what was measured."""
    rows = json.loads((ROOT / "results/bench/training_memory.json").read_text())["rows"]
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        told, measured = (f"{row[key] / 2**20:,.0f} MiB" for key in ("estimated_bytes", "measured_bytes"))
        assert f"| {told} | {measured} | {row['ratio']:.2f} |" in readme
    assert len(rows) == 13
    assert sum(0.76 < row["ratio"] < 1.25 for row in rows) >= 11


def test_the_memory_benchmark_refuses_unknown_cases() -> None:
    command = [sys.executable, "-m", "benchmarks.training_memory", "capsnet_smal:3"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "is not MODEL:BATCH or MODEL:BATCH:WAY" in run.stderr


def test_the_recorded_costs_of_data_are_the_readmes_and_within_their_bars() -> None:
    *rows, whole = json.loads((ROOT / "results/bench/data.json").read_text())["rows"]
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        cells = f"{1e3 * row['batch_seconds']:.1f} ms | {row['step_seconds']:.2f} s | {100 * row['share']:.2f} % |"
        assert cells in readme
        assert row["share"] < 0.05
    assert len(rows) == 7
    assert f"takes {whole['mnist_read_seconds']:.2f} s and {whole['mnist_bytes'] / 1e6:.0f} MB" in readme
    assert f"makes {whole['multimnist_per_second']:,.0f}" in readme
    assert whole["mnist_read_seconds"] < 2
    assert whole["mnist_bytes"] < 120e6
    assert whole["multimnist_per_second"] > 20_000


def recorded_run(name: str) -> dict[str, Any]:
    """A run under results/, after its files were seen to belong together."""
    folder = ROOT / "results/runs" / name
    report = json.loads((folder / "results.json").read_text())
    spec = RunDirectory(folder).read_config()
    assert (spec.model, spec.seed) == (report["model"], report["seed"])
    rows = read_metrics(folder / "metrics.csv")
    assert rows[-1]["step"] == report["steps"]
    assert report["command"].startswith("torchcaps train")
    assert report["machine"]["cores"]
    return report


def test_the_recorded_runs_are_the_readmes_and_reach_what_is_asked() -> None:
    text = (ROOT / "README.md").read_text()
    for name, least in (("sabour2017_mnist", 0.993), ("choi2019_mnist", 0.99)):
        report = recorded_run(name)
        found = report["test"][report["weights"]]
        assert found["n"] == 10_000
        assert found["accuracy"] >= least
        low, high = found["interval"]
        said = f"{100 * found['accuracy']:.2f} %"
        assert said in text
        assert f"{100 * low:.2f} to {100 * high:.2f}" in text


def test_the_recorded_demo_reaches_what_is_asked_in_time() -> None:
    text = (ROOT / "README.md").read_text()
    reports = [recorded_run(f"capsnet_small-{seed}") for seed in range(3)]
    assert [report["seed"] for report in reports] == [0, 1, 2]
    found = [report["test"][report["weights"]] for report in reports]
    assert all(one["n"] == 1_000 for one in found)
    mean = sum(one["accuracy"] for one in found) / 3
    assert mean >= 0.984
    assert f"{100 * mean:.2f} % of 1,000 digits" in text
    assert all(f"{100 * one['accuracy']:.1f}" in text for one in found)
    assert max(report["seconds"] for report in reports) < 180
    assert f"{max(report['seconds'] for report in reports):.0f} s at most" in text


def test_what_the_loop_costs_is_the_readmes_and_little_enough() -> None:
    rows = json.loads((ROOT / "results/bench/training.json").read_text())["rows"]
    readme, scaling = (ROOT / "README.md").read_text(), (ROOT / "docs/scaling.md").read_text()
    shares = {row["model"]: row["share"] for row in rows if row["kind"] == "loop"}
    assert shares["sabour2017_mnist"] < 0.03
    assert shares["capsnet_small"] < 0.10
    for name, share in shares.items():
        assert f"{100 * share:.1f} % for `{name}`" in " ".join(readme.split())
    answers = {row["command"]: row["seconds"] for row in rows if row["kind"] == "help"}
    assert answers["torchcaps --help"] < 0.5
    assert answers["torchcaps train --help"] < 2
    for command, seconds in answers.items():
        assert f"`{command}` answers in {seconds:.2f} s" in " ".join(readme.split())
    ways = [row for row in rows if row["kind"] == "processes"]
    assert {(row["processes"], row["threads"]) for row in ways} == {(1, 1), (1, 2), (2, 1)}
    for row in ways:
        cells = f"{row['step_seconds']:.3f} s | {row['images_per_second']:,.0f} | {100 * row['efficiency']:.0f} %"
        assert f"| {row['processes']} | {row['threads']} | {cells} |" in scaling
