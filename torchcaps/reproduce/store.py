"""What came out, on disk: a JSON file for each run and each measurement, images and long lists beside it, ``.npz``."""

import dataclasses
import datetime
import io
import json
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import move_into_place, staging_directory
from torchcaps._core.machine import describe_machine
from torchcaps._core.optional import import_optional
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Measure, Run
from torchcaps.training import RunSpec
from torchcaps.training.errors import RunError
from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunFolder

__all__ = ["RESULTS", "WORK", "Job", "Store", "as_hex", "from_hex", "source_name", "write_whole"]

RESULTS = Path("results/papers")
WORK = Path("runs/papers")
FEW = 64  # numbers of a list that a person may want to read in the JSON file


@dataclass(frozen=True)
class Job:
    """A run or a measurement with a seed: what is done once and has one record."""

    source: Run | Measure
    seed: int

    def key(self, scale: Scale) -> str:
        """Return the name of its record."""
        return f"{source_name(self.source, scale)}-seed{self.seed}"


_NAMES: dict[tuple[str, Scale], str] = {}  # of runs, which take a while to name


def source_name(source: Run | Measure, scale: Scale) -> str:
    """Return what the records of a source are called, whatever their seed."""
    if isinstance(source, Measure):
        return source.name
    words = repr(source), scale
    if words not in _NAMES:
        _NAMES[words] = run_spec(source, scale).record_name()
    return _NAMES[words]


class Store:
    """The records of one scale.

    Args:
        scale: which.
        results: where records, tables and figures are written, a folder for each scale.
        work: where runs are trained, with their checkpoints.
    """

    def __init__(self, scale: Scale, results: Path | str = RESULTS, work: Path | str = WORK) -> None:
        self.scale: Scale = scale
        self.results, self.work = Path(results).expanduser() / scale, Path(work).expanduser() / scale
        self.problems: dict[str, str] = {}  # of records that can't be read, where they are passed over
        self.forgiving = False
        self._read: dict[str, dict[str, Any]] = {}
        self._prints: dict[str, str] = {}  # of runs, which take a while to name

    def path(self, job: Job) -> Path:
        """Return where the record of a job is."""
        kind = "runs" if isinstance(job.source, Run) else "measures"
        return self.results / kind / f"{job.key(self.scale)}.json"

    def folder(self, job: Job) -> RunFolder:
        """Return where a run is trained."""
        return RunFolder(self.work / job.key(self.scale))

    def seeds(self, source: Run | Measure) -> list[int]:
        """Return the seeds that a source has records of."""
        first = self.path(Job(source, 0))
        found = [re.fullmatch(r".*-seed(\d+)", path.stem) for path in first.parent.glob(f"{first.stem[:-1]}*.json")]
        return sorted(int(match[1]) for match in found if match is not None)

    def record(self, job: Job) -> dict[str, Any] | None:
        """Return what came out of a job, arrays included; ``None`` where it has not been done."""
        path = self.path(job)
        if str(path) not in self._read:
            found = self._load(path)
            if found is None or (isinstance(job.source, Run) and not self._is_of(found, job)):
                return None  # a run with other settings is another one
            self._read[str(path)] = found
        found = self._read[str(path)]
        if isinstance(job.source, Measure) and found["options"] != _plain(self.options(job)):
            return None  # a measurement with other options is another one
        return found

    def _is_of(self, found: dict[str, Any], job: Job) -> bool:
        """Return whether a record is that of a run: its name stands for what the run changes, and defaults change."""
        assert isinstance(job.source, Run)
        now = run_spec(job.source, self.scale, job.seed).identity()
        then = {**found["config"], "model_spec": found.get("model_spec", now["model_spec"])}
        return all(then.get(name) == value for name, value in now.items())

    def _load(self, path: Path) -> dict[str, Any] | None:
        try:
            return self._whole(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            problem = f"{path} is no record ({error}): remove it, and it is made again"
            if not self.forgiving:
                raise RunError(problem) from error
            self.problems[str(path)] = problem
            return None

    def _whole(self, path: Path) -> dict[str, Any]:
        """Read a record with its arrays; raise where something is missing."""
        found = json.loads(path.read_text(encoding="utf-8"))
        kind = "options" if path.parent.name == "measures" else "config"
        if not isinstance(found, dict):
            raise ValueError("it holds no fields")
        for name in ("found", kind, "machine"):
            if not isinstance(found.get(name), dict):
                raise ValueError(f"it lacks {name!r}")
        if kind == "config" and not found["found"].get("diverged"):
            _check_tested(found["found"])
        if found.get("arrays"):
            numpy = import_optional("numpy", "arrays of records")
            try:
                with numpy.load(path.with_suffix(".npz")) as file:
                    found["found"] |= {name: torch.from_numpy(file[name]) for name in found["arrays"]}
            except FileNotFoundError as error:
                raise ValueError(f"{path.with_suffix('.npz').name} is missing beside it") from error
        return found

    def options(self, job: Job) -> dict[str, Any]:
        """Return the options of a measurement at this scale, with what its networks are."""
        measure = job.source
        assert isinstance(measure, Measure)
        options = dict(measure.options)
        options |= measure.cpu if self.scale == "cpu" else {}
        options |= measure.smoke if self.scale == "smoke" else {}
        runs = {name: self._net_name(run, job.seed) for name, run in measure.runs.items()}
        after = {name: self.options(Job(before, job.seed)) for name, before in measure.after.items()}
        version = {"version": measure.version} if measure.version > 1 else {}
        return {**options, **version, **({"runs": runs} if runs else {}), **({"after": after} if after else {})}

    def _net_name(self, run: Run, seed: int) -> str:
        """Return what a measurement calls one of its networks: the run's name, and all of its settings in short."""
        words = repr(run)
        if words not in self._prints:
            self._prints[words] = run_spec(run, self.scale).identity_hash()
        return f"{Job(run, seed).key(self.scale)} {self._prints[words]}"

    def write_run(self, job: Job, right: Tensor | None) -> None:
        """Write the record of a run that is over; ``right``: for each test image whether it was recognised."""
        assert isinstance(job.source, Run)
        folder = self.folder(job)
        report = json.loads(folder.results.read_text(encoding="utf-8"))
        config = {k: v for k, v in folder.read_config().to_plain().items() if k != "data_dir"}
        test = report["test"].get(report["eval_weights"]) or {}
        found = {
            "stop_reason": report["stop_reason"],
            "epochs": report["epochs"],
            "steps": report["steps"],
            "seconds": report["seconds"],
            "weights": report["eval_weights"],
            "accuracy": test.get("accuracy"),
            "n": test.get("n"),
            "n_right": test.get("n_right"),
            "tests": {kind: {k: one[k] for k in ("accuracy", "loss")} for kind, one in report["test"].items()},
            "by_class": test.get("found"),
            "right": None if right is None else as_hex(right),
        }
        curve = [{k: v for k, v in row.items() if v is not None} for row in read_metrics(folder.metrics)]
        rest = {"curve": curve, "machine": report["machine"]}
        self._write(job, {"config": config, "model_spec": self._net(job), "found": found, **rest}, {})

    def _net(self, job: Job) -> dict[str, Any]:
        assert isinstance(job.source, Run)
        return run_spec(job.source, self.scale, job.seed).identity()["model_spec"]

    def write_diverged(self, job: Job, spec: RunSpec, why: str) -> None:
        """Write the record of a run that did not train: that is a result too."""
        folder = self.folder(job)
        config = {k: v for k, v in spec.to_plain().items() if k != "data_dir"}
        curve = [{k: v for k, v in row.items() if v is not None} for row in read_metrics(folder.metrics)]
        seconds = curve[-1]["seconds"] if curve else 0.0  # of all sessions, up to the last whole epoch
        found = {
            "stop_reason": "diverged",
            "message": why,
            "diverged": True,
            "seconds": seconds,
            "accuracy": None,
            "n": None,
        }
        rest = {"curve": curve, "machine": describe_machine()}
        self._write(job, {"config": config, "model_spec": self._net(job), "found": found, **rest}, {})

    def write_measure(self, job: Job, found: Mapping[str, Any], seconds: float) -> None:
        """Write the record of a measurement."""
        small, arrays = {}, {}
        for name, value in found.items():
            if isinstance(value, Tensor):
                value = value.detach().cpu()
                if value.numel() > FEW:
                    arrays[name] = value.half() if value.is_floating_point() else value
                    continue
            small[name] = _plain(value)
        values = {"options": _plain(self.options(job)), "found": small, "seconds": round(seconds, 1)}
        self._write(job, {**values, "arrays": sorted(arrays), "machine": describe_machine()}, arrays)

    def _write(self, job: Job, values: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        path = self.path(job)
        head = {"name": job.key(self.scale), "scale": self.scale, "seed": job.seed}
        tail = {
            "command": shlex.join(["torchcaps", *sys.argv[1:]]),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if arrays:
            numpy = import_optional("numpy", "arrays of records")
            held = io.BytesIO()
            numpy.savez_compressed(held, **{name: value.numpy() for name, value in arrays.items()})
            write_whole(path.with_suffix(".npz"), held.getvalue())  # before the record that speaks of it
        else:
            path.with_suffix(".npz").unlink(missing_ok=True)
        write_whole(path, (json.dumps({**head, **values, **tail}, indent=1) + "\n").encode())
        self._read.pop(str(path), None)


def _check_tested(found: dict[str, Any]) -> None:
    """Refuse what a run was tested with, where it can't be."""
    for name in ("accuracy", "n", "seconds", "steps", "epochs"):
        value = found.get(name, "")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"its {name!r} is no number")
    if found["accuracy"] is not None and not 0 <= found["accuracy"] <= 1:
        raise ValueError("its 'accuracy' is no share")
    if found.get("right") is not None and len(bytes.fromhex(found["right"])) != -(-found["n"] // 8):
        raise ValueError("'right' does not have a bit for each of its images")


def as_hex(bits: Tensor) -> str:
    """Return truth values as hexadecimal digits, eight a byte, the first of them the highest bit.

    >>> as_hex(torch.tensor([True, False, False, False, False, False, False, True, True]))
    '8180'
    """
    padded = torch.cat([bits.to(torch.uint8), bits.new_zeros(-len(bits) % 8, dtype=torch.uint8)]).view(-1, 8)
    weights = 2 ** torch.arange(7, -1, -1)
    return bytes((padded * weights).sum(1).tolist()).hex()


def from_hex(text: str, n: int) -> Tensor:
    """Return the first ``n`` truth values that hexadecimal digits stand for.

    >>> from_hex("8180", 9).nonzero().flatten().tolist()
    [0, 7, 8]
    """
    values = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    return ((values[:, None] >> torch.arange(7, -1, -1)) & 1).flatten()[:n].bool()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging_directory(path.parent) as own:
            (own / path.name).write_bytes(content)
            move_into_place(own / path.name, path)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it."""
    if isinstance(value, Tensor):
        return value.tolist() if value.ndim else value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
