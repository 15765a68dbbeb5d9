"""Records on disk: one JSON file per run and per measurement, large arrays in an ``.npz`` file next to it."""

import io
import json
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import atomic_path, write_atomic
from torchcaps._core.machine import describe_machine, record_header
from torchcaps._core.optional import import_optional
from torchcaps._core.serialize import is_subset, to_json
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Measurement, Run
from torchcaps.training import RunSpec
from torchcaps.training.errors import RunError
from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.state import StopReason

__all__ = [
    "RESULTS_DIRECTORY",
    "WORK_DIRECTORY",
    "MeasurementCheckpoint",
    "RecordKey",
    "RecordStore",
    "has_diverged",
]

RESULTS_DIRECTORY = Path("results/papers")
WORK_DIRECTORY = Path("runs/papers")
MAX_JSON_ELEMENTS = 64  # larger tensors are stored in the .npz file
CHECKPOINT_INTERVAL_S = 60.0


@dataclass(frozen=True)
class RecordKey:
    """A run or measurement with a seed: the identity of one record."""

    source: Run | Measurement
    seed: int

    def name(self, scale: Scale) -> str:
        """Return the file name of the record, without suffix."""
        return f"{_source_name(self.source, scale)}-seed{self.seed}"


_SOURCE_NAMES: dict[tuple[str, Scale], str] = {}  # cache: hashing the settings of a run takes milliseconds


def _source_name(source: Run | Measurement, scale: Scale) -> str:
    """Return the name of a measurement, or the record name of a run at a scale; cached."""
    if isinstance(source, Measurement):
        return source.name
    key = repr(source), scale
    if key not in _SOURCE_NAMES:
        _SOURCE_NAMES[key] = run_spec(source, scale).record_name()
    return _SOURCE_NAMES[key]


class RecordStore:
    """The records of one scale.

    Args:
        scale: the scale.
        results: directory of records, tables and figures; each scale has a subdirectory.
        work: directory of the training runs and of intermediate files; each scale has a subdirectory.

    Attributes:
        skip_unreadable: collect unreadable records in ``problems`` instead of raising a `RunError`.
        problems: one message per unreadable record or item, by path or item.
    """

    def __init__(
        self, scale: Scale, results: Path | str = RESULTS_DIRECTORY, work: Path | str = WORK_DIRECTORY
    ) -> None:
        self.scale: Scale = scale
        self.results, self.work = Path(results).expanduser() / scale, Path(work).expanduser() / scale
        self.skip_unreadable = False
        self.problems: dict[str, str] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._identities: dict[str, dict[str, Any]] = {}  # cache by the run's repr

    def path(self, key: RecordKey) -> Path:
        """Return the path of a record."""
        kind = "runs" if isinstance(key.source, Run) else "measurements"
        return self.results / kind / f"{key.name(self.scale)}.json"

    def run_directory(self, key: RecordKey) -> RunDirectory:
        """Return the directory in which a run is trained."""
        return RunDirectory(self.work / key.name(self.scale))

    def work_directory(self, key: RecordKey) -> Path:
        """Return the directory of a measurement's checkpoint and output files."""
        return self.work / key.name(self.scale)

    def seeds(self, source: Run | Measurement) -> list[int]:
        """Return the seeds for which a source has a record."""
        first = self.path(RecordKey(source, 0))
        paths = first.parent.glob(f"{first.stem[:-1]}*.json")
        matches = [re.fullmatch(r".*-seed(\d+)", path.stem) for path in paths]
        return sorted(int(match[1]) for match in matches if match is not None)

    def read(self, key: RecordKey) -> dict[str, Any] | None:
        """Return a record including its arrays; ``None`` if it is missing or was made with other settings."""
        path = self.path(key)
        if str(path) not in self._records:
            record = self._load(path)
            if record is None or not _same_settings(record["settings"], self.settings(key)):
                return None
            self._records[str(path)] = record
        return self._records[str(path)]

    def has_diverged(self, key: RecordKey) -> bool:
        """Return whether the record of a run exists and reports divergence."""
        record = self.read(key)
        return record is not None and has_diverged(record)

    def _load(self, path: Path) -> dict[str, Any] | None:
        """Return the record in a file, or ``None`` if there is none; raise or collect the problem of a damaged file."""
        try:
            return _read_record(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            problem = f"{path} is not a valid record ({error}): remove it and run 'torchcaps reproduce' again"
            if not self.skip_unreadable:
                raise RunError(problem) from error
            self.problems[str(path)] = problem
            return None

    def settings(self, key: RecordKey) -> dict[str, Any]:
        """Return the settings that decide the result of a key, as JSON values.

        These are the identity of a run, or the options of a measurement with the settings of its runs and dependencies.
        """
        source = key.source
        if isinstance(source, Run):
            return {"record": key.name(self.scale), "identity": self._identity(source)}
        return {
            "options": to_json(self.options(source)),
            "version": source.version,
            "runs": {name: self.settings(RecordKey(run, key.seed)) for name, run in source.runs.items()},
            "depends_on": {name: self.settings(RecordKey(m, key.seed)) for name, m in source.depends_on.items()},
        }

    def options(self, measurement: Measurement) -> dict[str, Any]:
        """Return the keyword arguments of a measurement's function at this scale."""
        overrides = {
            "smoke": measurement.smoke,
            "cpu": measurement.cpu,
            "long": {**measurement.cpu, **measurement.long},
            "full": {},
        }
        return {**measurement.options, **overrides[self.scale]}

    def _identity(self, run: Run) -> dict[str, Any]:
        """Return `RunSpec.identity` of a run at this scale; cached."""
        key = repr(run)
        if key not in self._identities:
            self._identities[key] = run_spec(run, self.scale).identity()
        return self._identities[key]

    def write_run(self, key: RecordKey) -> None:
        """Write the record of a finished run from its run directory."""
        assert isinstance(key.source, Run)
        directory = self.run_directory(key)
        report = json.loads(directory.results.read_text(encoding="utf-8"))
        test = report["test"].get(report["eval_weights"]) or {}
        results = {
            "stop_reason": report["stop_reason"],
            "epochs": report["epochs"],
            "steps": report["steps"],
            "seconds": report["seconds"],
            "eval_weights": report["eval_weights"],
            "accuracy": test.get("accuracy"),
            "n": test.get("n"),
            "n_correct": test.get("n_correct"),
            "tests": {kind: {k: one[k] for k in ("accuracy", "loss")} for kind, one in report["test"].items()},
            "class_correct": test.get("class_correct"),
            "class_counts": test.get("class_counts"),
            "correct": test.get("correct"),
        }
        self._write_run(key, directory.read_config(), results, report["machine"])

    def write_diverged(self, key: RecordKey, spec: RunSpec, reason: str) -> None:
        """Write the record of a run that diverged: that is a result as well."""
        rows = read_metrics(self.run_directory(key).metrics)
        seconds = rows[-1]["seconds"] if rows else 0.0  # of all sessions, up to the last complete epoch
        results = {
            "stop_reason": StopReason.DIVERGED,
            "message": reason,
            "seconds": seconds,
            "accuracy": None,
            "n": None,
        }
        self._write_run(key, spec, results, describe_machine())

    def _write_run(self, key: RecordKey, spec: RunSpec, results: dict[str, Any], machine: dict[str, Any]) -> None:
        """Write a record of a run with its configuration, settings and learning curve."""
        assert isinstance(key.source, Run)
        rows = read_metrics(self.run_directory(key).metrics)
        values = {
            "config": {name: value for name, value in spec.to_plain().items() if name != "data_dir"},
            "settings": self.settings(key),
            "results": results,
            "curve": [{name: value for name, value in row.items() if value is not None} for row in rows],
            "machine": machine,
        }
        self._write(key, values, {})

    def write_measurement(self, key: RecordKey, results: Mapping[str, Any], seconds: float) -> None:
        """Write the record of a measurement; floating-point tensors of the ``.npz`` file are stored as float16."""
        small, arrays = {}, {}
        for name, value in results.items():
            if isinstance(value, Tensor) and value.numel() > MAX_JSON_ELEMENTS:
                value = value.detach().cpu()
                arrays[name] = value.half() if value.is_floating_point() else value
            else:
                small[name] = to_json(value)
        values = {"settings": self.settings(key), "results": small, "seconds": round(seconds, 1)}
        self._write(key, {**values, "arrays": sorted(arrays), "machine": describe_machine()}, arrays)

    def _write(self, key: RecordKey, values: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        """Write a record as JSON, with its arrays in an ``.npz`` file next to it."""
        path = self.path(key)
        if arrays:
            numpy = import_optional("numpy", "arrays of records")
            buffer = io.BytesIO()
            numpy.savez_compressed(buffer, **{name: value.numpy() for name, value in arrays.items()})
            write_atomic(path.with_suffix(".npz"), buffer.getvalue(), RunError, sweep=True)  # first
        else:
            path.with_suffix(".npz").unlink(missing_ok=True)
        record = {"name": key.name(self.scale), "scale": self.scale, "seed": key.seed, **values, **record_header()}
        write_atomic(path, json.dumps(record, indent=1) + "\n", RunError, sweep=True)
        self._records.pop(str(path), None)


def _read_record(path: Path) -> dict[str, Any]:
    """Return a record with its arrays; raise a ValueError if it is incomplete."""
    record = json.loads(path.read_text(encoding="utf-8"))
    is_run = path.parent.name == "runs"
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for name in ("results", "settings", "machine", *(["config"] if is_run else [])):
        if not isinstance(record.get(name), dict):
            raise ValueError(f"expected an object {name!r}, got {record.get(name)!r}")
    if is_run and not has_diverged(record):
        _check_run_results(record["results"])
    if record.get("arrays"):
        numpy = import_optional("numpy", "arrays of records")
        try:
            with numpy.load(path.with_suffix(".npz")) as file:
                record["results"] |= {name: torch.from_numpy(file[name]) for name in record["arrays"]}
        except FileNotFoundError as error:
            raise ValueError(f"missing file {path.with_suffix('.npz').name}") from error
    return record


def _same_settings(recorded: dict[str, Any], current: dict[str, Any]) -> bool:
    """Return whether recorded settings equal the current ones.

    A setting of a run that the record lacks was added later; it has its default value, since the name of the record
    would differ otherwise.
    """
    if recorded.keys() != current.keys():
        return False
    if "identity" in current:
        return recorded["record"] == current["record"] and is_subset(recorded["identity"], current["identity"])
    if any(recorded[name] != current[name] for name in ("options", "version")):
        return False
    return all(
        recorded[part].keys() == current[part].keys()
        and all(_same_settings(recorded[part][name], value) for name, value in current[part].items())
        for part in ("runs", "depends_on")
    )


def has_diverged(record: dict[str, Any]) -> bool:
    """Return whether a record is that of a run that diverged."""
    return record["results"].get("stop_reason") == StopReason.DIVERGED


def _check_run_results(results: dict[str, Any]) -> None:
    """Raise a ValueError if the results of a run are incomplete or invalid."""
    for name in ("accuracy", "n", "seconds", "steps", "epochs"):
        if name not in results:
            raise ValueError(f"missing result {name!r}")
        value = results[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name!r} must be a number, got {value!r}")
    if results["accuracy"] is not None and not 0 <= results["accuracy"] <= 1:
        raise ValueError(f"'accuracy' must be in 0..1, got {results['accuracy']!r}")
    if results.get("correct") is not None and len(bytes.fromhex(results["correct"])) != -(-results["n"] // 8):
        raise ValueError(f"'correct' must have one bit per test image ({results['n']})")


class MeasurementCheckpoint:
    """A checkpoint from which an interrupted measurement resumes.

    Args:
        path: the checkpoint file.
        options: options of the measurement; a checkpoint with other options is ignored. ``None``: accept any options.
        interval: seconds between checkpoints.
    """

    def __init__(self, path: Path, options: dict[str, Any] | None, interval: float = CHECKPOINT_INTERVAL_S) -> None:
        self.path, self.options, self.interval = path, options, interval
        self._saved_at = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the saved state; ``None`` if there is none, if it is unreadable or if it has other options."""
        try:
            content = torch.load(self.path, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, LookupError, struct.error, pickle.UnpicklingError):
            return None
        if not isinstance(content, dict) or "state" not in content:
            return None
        return content["state"] if self.options is None or content.get("options") == self.options else None

    @property
    def due(self) -> bool:
        """Whether the interval since the last checkpoint has passed."""
        return time.monotonic() - self._saved_at >= self.interval

    def save(self, state: dict[str, Any]) -> None:
        """Write the state atomically."""
        try:
            with atomic_path(self.path, RunError, sweep=True) as temporary:
                torch.save({"state": state, "options": self.options}, temporary)
        except RuntimeError as error:  # raised by torch.save if the disk is full
            if isinstance(error, RunError):
                raise
            raise RunError(f"{self.path} can't be written: {str(error).splitlines()[0]}") from error
        self._saved_at = time.monotonic()

    def remove(self) -> None:
        """Delete the checkpoint after the measurement has finished."""
        self.path.unlink(missing_ok=True)
