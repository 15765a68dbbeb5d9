"""Mutated run directories for every command that opens one.

Mutants: changed bytes of any file, hostile values in settings and in checkpoints (with valid checksums), and links,
FIFOs and directories in place of files. A mutant must be rejected in one line, or be opened. Nothing may be executed
(modules that leave a file are in the run directory and in the current directory), nothing may be written outside of the
run directory and the user's data directory, and changed bytes of a checkpoint must not change weights silently.
"""

import contextlib
import copy
import io
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from tests.fuzz.harness import Case, Target
from tests.fuzz.hostile import HOSTILE, LINES
from tests.fuzz.mutate import mutate
from torchcaps.cli import main
from torchcaps.data import DownloadError, storage
from torchcaps.training import RunError, RunSpec, load_run, run
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint

__all__ = ["Runs"]

OPEN_TIMEOUT_S = 120  # of a command that does not train
TRAIN_TIMEOUT_S = 20  # the settings of a valid run can ask for a long training, which is ended
LAST = "checkpoints/last.safetensors"
CANARY = "open({path!r}, 'w').close()\nclass Net: pass\nclass Data: pass\nclass Routing: pass\n"
SIZES = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}


class _Timeout(BaseException):
    """A command takes too long."""


class Runs(Target):
    """Run directories."""

    name, unit = "runs", "mutants"
    good = ("rejected", "opened", "long")
    input = "input/run"

    def prepare(self, work: Path) -> None:
        """Train the run that is mutated, and enter a directory with a canary."""
        torch.set_num_threads(1)
        run.draw_run = lambda *_: []  # takes longer than everything else
        self.valid = work / "valid"
        if not self.valid.exists():
            spec = RunSpec.of("capsnet_small", **SIZES, steps=2, max_train_images=40, max_test_images=10, num_threads=1)
            with contextlib.redirect_stdout(io.StringIO()):
                run.train(spec, self.valid, figures=False)
            for name in ("previous", "best"):
                (self.valid / f"checkpoints/{name}.safetensors").unlink(missing_ok=True)
        self.config = yaml.safe_load((self.valid / "config.yaml").read_text())
        self.checkpoint = read_checkpoint(self.valid / LAST)
        self.weights = load_run(self.valid).model.state_dict()
        (work / "input").mkdir(exist_ok=True)
        os.chdir(work / "input")
        pixels = np.random.default_rng(0).integers(0, 256, (28, 28)).astype(np.uint8)
        Image.fromarray(pixels).save("image.png")
        self.outside, self.data = work / "outside", work / "data"
        os.environ["TORCHCAPS_DATA"] = str(self.data)
        self.downloads: list[Path] = []
        storage.download_file = self._download

    def _download(self, name: str, urls: Any, checksum: str, directory: Path, size: int = 0) -> Path:
        self.downloads.append(directory)
        raise DownloadError("no network")

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Open one mutant with one command."""
        rng = np.random.default_rng([seed, index])
        executed = Path("executed")
        for path in (Path("run"), self.outside):
            shutil.rmtree(path, ignore_errors=True)
        executed.unlink(missing_ok=True)
        self.downloads.clear()
        shutil.copytree(self.valid, "run")
        self.outside.mkdir()
        (self.outside / "precious").write_text("content")
        for directory in (Path(), Path("run")):
            for name in ("canary.py", "sitecustomize.py", "yaml.py"):
                (directory / name).write_text(CANARY.format(path=str(executed.absolute())))
        kind = list(MUTATIONS)[int(rng.integers(len(MUTATIONS)))]
        MUTATIONS[kind](self, rng)
        order = [opener for opener in OPENERS for _ in range(WEIGHTS.get(opener, 1))]
        opener = order[int(rng.integers(len(order)))]
        outcome, message = self._open(opener, kind)
        outside = [path.name for path in self.outside.iterdir()]
        if executed.exists() or "canary" in sys.modules:
            outcome, message = "executed", f"by {opener}"
        elif outside != ["precious"] or (self.outside / "precious").read_text() != "content":
            outcome, message = "wrote-outside", f"{outside} by {opener}"
        elif any(not path.is_relative_to(self.data) for path in self.downloads):
            outcome, message = "wrote-outside", f"download to {self.downloads} by {opener}"
        return Case(index, f"{kind}, {opener}", outcome, message)

    def _open(self, opener: str, kind: str) -> tuple[str, str]:
        """Open the mutant; return outcome and message."""
        stdout, stderr = io.StringIO(), io.StringIO()
        trains = opener in ("resume", "config")
        status: object = 0
        try:
            with (
                _time_limit(TRAIN_TIMEOUT_S if trains else OPEN_TIMEOUT_S),
                contextlib.redirect_stdout(stdout),
                contextlib.redirect_stderr(stderr),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("always")
                OPENERS[opener](self, kind)
        except SystemExit as stop:
            status = stop.code
        except _Timeout:
            return ("long", "") if trains else ("hang", opener)
        except _SilentChange as error:
            return "silent", str(error)
        except (ValueError, RunError) as error:
            if opener != "load":
                return "exception", "".join(traceback.format_exception(error)[-3:])
            return ("several-lines" if "\n" in str(error) else "rejected"), str(error)
        except BaseException as error:
            return "exception", f"{opener}: " + "".join(traceback.format_exception(error)[-4:])
        output = stdout.getvalue() + stderr.getvalue()
        if {"\x1b", "\u202e", "\x00", "\x07"} & set(output):
            return "control-characters", repr(output[-500:])
        if not status:
            return "opened", ""
        lines = stderr.getvalue().strip().splitlines()
        if "Traceback" in output or not lines or not lines[-1].startswith("torchcaps"):
            return "no-sentence", f"{opener}: {output[-500:]}"
        return "rejected", ""


class _SilentChange(Exception):
    """Weights have changed without an error."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_Timeout` in this thread after some time, if the system has timers."""

    def stop(*_: object) -> None:
        raise _Timeout

    if not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# Commands ----------------------------------------------------------------------------------------------------------


def _load(target: Runs, kind: str) -> None:
    loaded = load_run("run").model.state_dict()
    if kind.startswith("bytes"):
        for name, tensor in target.weights.items():
            if name not in loaded or not torch.equal(loaded[name], tensor):
                raise _SilentChange(f"{name} differs")


# Relative numbers of mutants. Every command starts by loading a run; an analysis takes 15 times as long as that.
WEIGHTS = {"load": 12, "predict": 6, "evaluate": 4, "resume": 2}
FLAGS = "--num-threads 1 --num-workers 0 --devices 1 --device cpu --max-test-images 10"


def _command(text: str) -> Callable[[Runs, str], None]:
    return lambda *_: main([*text.split()])


OPENERS: dict[str, Callable[[Runs, str], None]] = {
    "load": _load,
    "predict": _command("predict run image.png --json --num-threads 1"),
    "evaluate": _command("evaluate run --max-images 10 --num-threads 1"),
    "analyze": _command("analyze run dead --max-images 10 --num-threads 1"),
    "resume": _command(f"train --resume run --steps 3 {FLAGS}"),
    "config": _command(f"train --config run/config.yaml --steps 1 --max-train-images 20 --out run/new {FLAGS}"),
}


# Mutations ---------------------------------------------------------------------------------------------------------


def _change_bytes(name: str) -> Callable[[Runs, np.random.Generator], None]:
    def change(target: Runs, rng: np.random.Generator) -> None:
        path = Path("run", name)
        path.write_bytes(mutate(path.read_bytes(), rng))

    return change


def _hostile_value(target: Runs, rng: np.random.Generator) -> Any:
    value = copy.deepcopy(HOSTILE[int(rng.integers(len(HOSTILE)))])
    return value.replace("OUTSIDE", str(target.outside)) if isinstance(value, str) else value


def _replace_somewhere(values: Any, target: Runs, rng: np.random.Generator) -> Any:
    """Return nested values with one of them replaced, removed or added."""
    if isinstance(values, dict) and values and rng.random() < 0.9:
        key = list(values)[int(rng.integers(len(values)))]
        changed = dict(values)
        kind = rng.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.15:
            changed[str(_hostile_value(target, rng))] = _hostile_value(target, rng)
        else:
            changed[key] = _replace_somewhere(values[key], target, rng)
        return changed
    if isinstance(values, list) and values and rng.random() < 0.5:
        index = int(rng.integers(len(values)))
        return [_replace_somewhere(v, target, rng) if i == index else v for i, v in enumerate(values)]
    return _hostile_value(target, rng)


def _change_settings(target: Runs, rng: np.random.Generator) -> None:
    config = target.config
    for _ in range(int(rng.integers(1, 4))):
        config = _replace_somewhere(config, target, rng)
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    if rng.random() < 0.5:  # the checkpoint does not contradict
        write_checkpoint(Path("run", LAST), target.checkpoint.tensors, {**target.checkpoint.state, "config": {}})


def _add_line(target: Runs, rng: np.random.Generator) -> None:
    line = LINES[int(rng.integers(len(LINES)))].replace("OUTSIDE", str(target.outside))
    lines = Path("run/config.yaml").read_text().splitlines()
    lines.insert(int(rng.integers(len(lines) + 1)), line)
    Path("run/config.yaml").write_text("\n".join(lines))


def _change_state(target: Runs, rng: np.random.Generator) -> None:
    state = target.checkpoint.state
    for _ in range(int(rng.integers(1, 4))):
        state = _replace_somewhere(state, target, rng)
    write_checkpoint(Path("run", LAST), target.checkpoint.tensors, state)


def _change_tensors(target: Runs, rng: np.random.Generator) -> None:
    tensors = dict(target.checkpoint.tensors)
    name = list(tensors)[int(rng.integers(len(tensors)))]
    tensor, kind = tensors[name], int(rng.integers(7))
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[str(_hostile_value(target, rng))] = tensor
    elif kind == 2:
        dtypes = (torch.int8, torch.bool, torch.complex64, torch.float64, torch.float16, torch.uint8, torch.int64)
        tensors[name] = tensor.to(dtypes[int(rng.integers(len(dtypes)))])
    elif kind == 3:
        tensors[name] = tensor.reshape(-1)[: int(rng.integers(0, tensor.numel() + 1))]
    elif kind == 4:
        tensors[name] = torch.full_like(tensor, float(rng.choice([np.nan, np.inf, 1e38, -1e38, 1e-45, 0])))
    elif kind == 5:
        tensors[name] = tensor.unsqueeze(0)
    else:
        tensors[f"pipeline.{rng.integers(3)}"] = torch.randn(tuple(rng.integers(0, 4, int(rng.integers(0, 4)))))
    write_checkpoint(Path("run", LAST), tensors, target.checkpoint.state)


def _change_header(target: Runs, rng: np.random.Generator) -> None:
    """Change offsets, shapes and dtypes in the header of a safetensors file."""
    data = Path("run", LAST).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = list(header)[int(rng.integers(len(header)))]
    numbers = (0, 1, -1, 8, 10**4, 2**31, 2**62, 2**63, 2**64)
    if name == "__metadata__" or rng.random() < 0.3:
        header = _replace_somewhere(header, target, rng)
    elif rng.random() < 0.5:
        offsets = header[name]["data_offsets"]
        offsets[int(rng.integers(2))] = numbers[int(rng.integers(len(numbers)))]
    else:
        header[name]["shape"] = [numbers[int(rng.integers(len(numbers)))] for _ in range(int(rng.integers(0, 4)))]
    text = json.dumps(header).encode()
    length = len(text) if rng.random() < 0.9 else int(numbers[int(rng.integers(len(numbers)))]) % 2**64
    Path("run", LAST).write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])


def _change_file_system(target: Runs, rng: np.random.Generator) -> None:
    """Replace a file by nothing, an empty file, a directory, a FIFO, a link or a large sparse file."""
    names = ("config.yaml", LAST, "checkpoints", "metrics.csv", "results.json", "lock", "figures", "predictions")
    path = Path("run", names[int(rng.integers(len(names)))])
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    kind = int(rng.integers(7))
    if kind == 1:
        path.touch()
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        links = ("/dev/zero", "/dev/stdin", "/etc/passwd", "missing", str(target.outside), path.name, "../image.png")
        path.symlink_to((*links, str(target.outside / "precious"))[int(rng.integers(len(links) + 1))])
    elif kind == 5:
        with path.open("wb") as file:
            file.truncate(2**33)
    elif kind == 6:
        path.write_bytes(rng.bytes(int(rng.integers(1, 5000))))


MUTATIONS: dict[str, Callable[[Runs, np.random.Generator], None]] = {
    "bytes of settings": _change_bytes("config.yaml"),
    "bytes of weights": _change_bytes(LAST),
    "bytes of metrics": _change_bytes("metrics.csv"),
    "settings": _change_settings,
    "lines of settings": _add_line,
    "state": _change_state,
    "tensors": _change_tensors,
    "header": _change_header,
    "file system": _change_file_system,
}
