"""Mutated directories in the layout of the Hugging Face Hub for `torchcaps.hub.HubModel.from_pretrained`.

Mutants: changed bytes, hostile values in the config, other tensors, and FIFOs, directories and large files. A mutant
must be rejected with a `HubError` of one line, or be loaded; a loaded model is evaluated.
"""

import contextlib
import copy
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from tests.fuzz.harness import Case, Target
from tests.fuzz.hostile import HOSTILE
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import CANARY
from torchcaps.hub import HubError, HubModel
from torchcaps.models import create_model

__all__ = ["Hub"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SIZES: dict[str, Any] = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}
DTYPES = (torch.int8, torch.bool, torch.complex64, torch.float64, torch.float16, torch.uint8, torch.int64)
VALUES = (np.nan, np.inf, 1e38, -1e38, 1e-45, 0)


class Hub(Target):
    """Directories of the Hub."""

    name, unit = "hub", "mutants"
    good = ("rejected", "loaded")

    def prepare(self, work: Path) -> None:
        """Write the valid directory; put a module on the search path that must not be imported."""
        torch.set_num_threads(1)
        self.executed, modules, self.valid = work / "executed", work / "modules", work / "valid"
        modules.mkdir(exist_ok=True)
        (modules / "canary.py").write_text(CANARY.format(path=str(self.executed)))
        sys.path.append(str(modules))
        torch.manual_seed(0)
        with contextlib.redirect_stdout(None):
            HubModel(create_model("capsnet_small", **SIZES)).save_pretrained(self.valid)
        self.config = json.loads((self.valid / CONFIG).read_text())
        self.tensors = safetensors.torch.load_file(self.valid / WEIGHTS)
        load(self.valid)

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Load one mutant."""
        rng = np.random.default_rng([seed, index])
        kind = list(MUTATIONS)[int(rng.integers(len(MUTATIONS)))]
        directory = work / self.input
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.valid, directory)
        MUTATIONS[kind](self, directory, rng)
        outcome, message = "loaded", ""
        try:
            load(directory)
        except HubError as error:
            outcome, message = ("several-lines" if "\n" in str(error) else "rejected"), str(error)
        except BaseException as error:
            outcome, message = "exception", "".join(traceback.format_exception(error)[-3:])
        if self.executed.exists() or "canary" in sys.modules:
            self.executed.unlink(missing_ok=True)
            sys.modules.pop("canary", None)
            outcome, message = "executed", "code was executed"
        return Case(index, kind, outcome, message)


def load(directory: Path) -> None:
    """Load a directory and evaluate its model on one image."""
    model = HubModel.from_pretrained(str(directory)).eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *model.model.spec.image))
    except ValueError as error:  # of changed weights, for which the format has no checksum
        if "finite" not in str(error) and "must be smaller" not in str(error):
            raise
        raise HubError(str(error)) from error


def _replace(values: Any, rng: np.random.Generator) -> Any:
    """Return nested values with one of them replaced or removed."""
    if isinstance(values, dict) and values and rng.random() < 0.9:
        key = list(values)[int(rng.integers(len(values)))]
        changed = dict(values)
        if rng.random() < 0.1:
            del changed[key]
        else:
            changed[key] = _replace(values[key], rng)
        return changed
    return copy.deepcopy(HOSTILE[int(rng.integers(len(HOSTILE)))])


def _change_config(target: Hub, directory: Path, rng: np.random.Generator) -> None:
    config = target.config
    for _ in range(int(rng.integers(1, 4))):
        config = _replace(config, rng)
    (directory / CONFIG).write_text(json.dumps(config))


def _change_fields(target: Hub, directory: Path, rng: np.random.Generator) -> None:
    fields = target.config["fields"]
    for _ in range(int(rng.integers(1, 3))):
        fields = _replace(fields, rng)
    (directory / CONFIG).write_text(json.dumps({**target.config, "fields": fields}))


def _change_bytes(name: str) -> Callable[[Hub, Path, np.random.Generator], None]:
    def change(target: Hub, directory: Path, rng: np.random.Generator) -> None:
        (directory / name).write_bytes(mutate((directory / name).read_bytes(), rng))

    return change


def _change_tensors(target: Hub, directory: Path, rng: np.random.Generator) -> None:
    tensors = dict(target.tensors)
    name, kind = list(tensors)[int(rng.integers(len(tensors)))], int(rng.integers(5))
    tensor = tensors[name]
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors["x\x1b[2J" if rng.random() < 0.5 else "a" * 100_000] = tensor.clone()
    elif kind == 2:
        tensors[name] = tensor.to(DTYPES[int(rng.integers(len(DTYPES)))])
    elif kind == 3:
        tensors[name] = tensor.reshape(-1)[: int(rng.integers(0, tensor.numel() + 1))].clone()
    else:
        tensors[name] = torch.full_like(tensor, float(rng.choice(VALUES)))
    safetensors.torch.save_file(tensors, directory / WEIGHTS)


def _change_file_system(target: Hub, directory: Path, rng: np.random.Generator) -> None:
    """Replace a file by nothing, an empty file, a directory, a FIFO, a link or a large sparse file."""
    path, kind = directory / str(rng.choice([CONFIG, WEIGHTS])), int(rng.integers(6))
    path.unlink()
    if kind == 1:
        path.touch()
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to(str(rng.choice(["/dev/zero", "/dev/stdin", "missing", path.name, "/etc/passwd"])))
    elif kind == 5:
        with path.open("wb") as file:
            file.truncate(2**33)


MUTATIONS: dict[str, Callable[[Hub, Path, np.random.Generator], None]] = {
    "bytes of the config": _change_bytes(CONFIG),
    "bytes of weights": _change_bytes(WEIGHTS),
    "config": _change_config,
    "fields": _change_fields,
    "tensors": _change_tensors,
    "file system": _change_file_system,
}
