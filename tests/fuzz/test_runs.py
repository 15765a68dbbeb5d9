"""A fixed slice of the mutated run directories; ``make fuzz`` runs more of them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz import runs
from tests.fuzz.harness import Case, fuzz
from tests.fuzz.runs import Runs
from tests.sampling import all_cases
from torchcaps.data import storage
from torchcaps.training import run

N_MUTANTS = 300 if all_cases() else 24


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Restore what the target changes in its process."""
    directory, draw, download = os.getcwd(), run.draw_run, storage.download_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHCAPS_DATA", os.environ.get("TORCHCAPS_DATA", ""))
        yield
    os.chdir(directory)
    run.draw_run, storage.download_file = draw, download


def test_mutated_run_directories_are_rejected_or_opened() -> None:
    report = fuzz(Runs(), seed=0, budget=N_MUTANTS, isolated=False)
    assert report.failures == []
    assert report.n_evaluations == N_MUTANTS
    assert {"rejected", "opened"} <= set(report.by_outcome()) <= set(Runs.good)


def run_planted(work: Path, monkeypatch: pytest.MonkeyPatch, opener: Any) -> str:
    """Return the outcome of a case whose command is replaced."""
    target = Runs()
    target.prepare(work)
    monkeypatch.setattr(runs, "OPENERS", {"planted": opener})
    monkeypatch.setattr(runs, "MUTATIONS", {"bytes of nothing": lambda *_: None})
    case = target.run(0, 0, work)
    assert isinstance(case, Case)
    return case.outcome


def test_failures_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: object) -> None:
        exec(Path("run/canary.py").read_text())

    def write_outside(target: Runs, _: str) -> None:
        (target.outside / "precious").write_text("changed")

    def download(target: Runs, _: str) -> None:
        with contextlib.suppress(storage.MissingDataError):
            storage.download_file("file", [], "", target.outside)

    def print_control_characters(*_: object) -> None:
        print("\x1b[2J")

    def fail(*_: object) -> None:
        print("Traceback", file=sys.stderr)
        raise SystemExit(1)

    def change_silently(target: Runs, kind: str) -> None:
        target.weights = {name: tensor + 1 for name, tensor in target.weights.items()}
        runs._load(target, kind)

    outcomes = {
        execute: "executed",
        write_outside: "wrote-outside",
        download: "wrote-outside",
        print_control_characters: "control-characters",
        fail: "no-sentence",
        change_silently: "silent",
        lambda *_: 1 / 0: "exception",
        lambda *_: None: "opened",
    }
    for opener, outcome in outcomes.items():
        assert run_planted(tmp_path, monkeypatch, opener) == outcome


def test_mutations_are_reproducible(tmp_path: Path) -> None:
    target = Runs()
    target.prepare(tmp_path)
    values = [runs._replace_somewhere(target.config, target, np.random.default_rng(1)) for _ in range(2)]
    assert values[0] == values[1] != target.config
