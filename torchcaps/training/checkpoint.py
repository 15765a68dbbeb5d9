"""Checkpoints: one safetensors file, written atomically and verified when read.

Tensors are in the safetensors format, so that reading a file executes no code. Its header holds all other state as
JSON and a checksum over everything: safetensors alone would read changed bytes without an error.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps._core.files import (
    check_regular_file,
    move_into_place,
    reason_of,
    staging_directory,
    sync_directory,
    sync_file,
)
from torchcaps._core.optional import import_optional
from torchcaps._core.validation import is_unicode
from torchcaps.data import SubtractMeanImage
from torchcaps.training.config import RunSpec
from torchcaps.training.ema import EMA
from torchcaps.training.errors import CheckpointError, RunError
from torchcaps.training.setup import RunData
from torchcaps.training.state import TrainState

if TYPE_CHECKING:
    from torchcaps.training.run_dir import RunDirectory

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "check_same_run",
    "load_optimizer_state",
    "optimizer_state",
    "read_checkpoint",
    "read_checkpoint_state",
    "restore_training",
    "write_checkpoint",
]

FORMAT = "torchcaps checkpoint 2"


class Checkpoint(NamedTuple):
    """Content of a checkpoint file.

    Args:
        tensors: by qualified name, such as ``model.front.conv1.weight``.
        state: JSON-compatible state: counters, configuration, class names.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def section(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors named ``prefix.*``, without the prefix."""
        return {name[len(prefix) + 1 :]: t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}

    def load_weights(self, model: nn.Module, section: str = "model") -> None:
        """Load a section into a model; names, shapes and kinds of dtype must match (`check_weights`)."""
        self.check_weights(model, section)
        model.load_state_dict(self.section(section))

    def check_weights(self, model: nn.Module, section: str = "model") -> None:
        """Raise `CheckpointError` if the weights of a section do not belong to a model, which may be on ``meta``."""
        weights = self.section(section)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if expected != stored:
            name = min(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name))
            theirs, ours = (f"shape {list(s[name])}" if name in s else "not present" for s in (stored, expected))
            raise CheckpointError(
                f"its weights belong to another model: {name} is {theirs} in the checkpoint and {ours} in the model"
            )
        for name, tensor in model.state_dict().items():
            if _dtype_kind(tensor.dtype) != _dtype_kind(weights[name].dtype):
                raise CheckpointError(f"its weights {name} are {weights[name].dtype}; the model has {tensor.dtype}")

    @property
    def step(self) -> int:
        """Number of optimizer steps of its run."""
        run = self.state.get("run")
        step = run.get("step") if isinstance(run, dict) else None
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"its state has no valid number of steps: {_shorten(run)}")
        return step

    def class_names(self, count: int) -> tuple[str, ...]:
        """Return the names of the classes; raise `CheckpointError` if there are not ``count`` of them."""
        names = self.state.get("classes")
        if not isinstance(names, list) or not all(isinstance(name, str) and is_unicode(name) for name in names):
            raise CheckpointError(f"its state has no valid class names: {_shorten(names)}")
        if len(names) != count:
            raise CheckpointError(f"its state has the names of {len(names)} classes; the model has {count}")
        return tuple(names)


class CheckpointWriter:
    """Assembles and writes the checkpoints of one run.

    Args:
        directory: the run directory.
        spec: settings of the run.
        data: its data sets.

    Attributes:
        resume_command: the command that continues the run, for messages.
    """

    def __init__(self, directory: "RunDirectory", spec: RunSpec, data: RunData) -> None:
        self.last, self.previous, self.best = directory.last, directory.previous, directory.best
        trust = " --trust-remote-code" if spec.names_own_code else ""
        self.resume_command = f"torchcaps train --resume {directory.path}{trust}"
        train = data.train
        self._constants = {"config": spec.to_plain(), "classes": list(train.classes), "n_images": len(train)}
        means = [step.mean for step in data.pipeline.transforms(False) if isinstance(step, SubtractMeanImage)]
        self._pipeline = {f"pipeline.{index}": mean for index, mean in enumerate(means) if mean is not None}

    @property
    def status(self) -> str:
        """Sentence that names the newest checkpoint, for errors."""
        existing = [path for path in (self.last, self.previous) if path.exists()]
        return f"The last good checkpoint is {existing[0]}." if existing else "No checkpoint was saved yet."

    def save_last(
        self,
        state: TrainState,
        precision: Mapping[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: EMA | None,
    ) -> None:
        """Write all that an exact resume needs; the file so far becomes ``previous``.

        Args:
            state: the run's counters.
            precision: state of the gradient scaler.
            model: its weights.
            optimizer: its state.
            ema: the EMA weights, if the run has them.
        """
        tensors = _add_prefix("model", model.state_dict())
        tensors |= _add_prefix("optimizer", optimizer_state(optimizer))
        if ema is not None:
            tensors |= _add_prefix("ema", ema.state_dict())
        self._write(self.last, tensors, state, precision, self.previous)

    def save_best(self, state: TrainState, precision: Mapping[str, Any], model: nn.Module) -> None:
        """Write the weights with the best validation result."""
        self._write(self.best, _add_prefix("model", model.state_dict()), state, precision)

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        state: TrainState,
        precision: Mapping[str, Any],
        previous: Path | None = None,
    ) -> None:
        """Write a checkpoint; if that fails, the error states the last checkpoint and how to continue."""
        plain = {"run": state.to_plain(), **self._constants, "precision": precision}
        try:
            write_checkpoint(path, tensors | self._pipeline, plain, previous)
        except RunError as error:
            advice = f"Free some space, then continue with: {self.resume_command}"
            raise RunError(f"{error}. {self.status} {advice}") from error


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], previous: Path | None = None
) -> None:
    """Write a checkpoint atomically: it is synced to disk before it replaces an existing file.

    Args:
        path: the file.
        tensors: by qualified name.
        state: JSON-compatible state.
        previous: an existing file at ``path`` is renamed to this; without it, it is replaced.
    """
    safetensors = import_optional("safetensors.torch", "a checkpoint")
    separate = dict(_unshare(tensors))
    text = json.dumps(state)
    header = {"format": FORMAT, "state": text, "checksum": _checksum(separate, text)}
    try:
        with staging_directory(path.parent, sweep=False) as staging:
            safetensors.save_file(separate, staging / path.name, header)
            sync_file(staging / path.name)  # a full disk may show only now: the old file is still in place
            if previous is not None and path.exists():
                os.replace(path, previous)
            move_into_place(staging / path.name, path)
            sync_directory(path.parent)
    except OSError as error:
        raise RunError(f"{path} can't be written: {reason_of(error)}") from error
    except import_optional("safetensors", "a checkpoint").SafetensorError as error:
        reason = str(error).removeprefix("Error while serializing: I/O error: ").partition(" (os error")[0]
        raise RunError(f"{path} can't be written: {reason}") from error


def read_checkpoint(path: Path, device: torch.device | str = "cpu", max_bytes: int | None = None) -> Checkpoint:
    """Read a checkpoint and verify its format and checksum.

    Args:
        path: the file.
        device: device of the tensors.
        max_bytes: largest size of the file, for example that of a checkpoint of its model; default: any size.
    """
    safetensors = import_optional("safetensors", "a checkpoint")
    try:
        check_regular_file(path)
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:  # a sparse file of any size takes no space on the disk
            raise CheckpointError(f"{path} has {size:,} bytes, more than a checkpoint of its model: {max_bytes:,}")
        with safetensors.safe_open(path, "pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a torchcaps checkpoint: its format is not {FORMAT!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        state = json.loads(header["state"])
        if not isinstance(state, dict):
            raise ValueError(f"its state must be a mapping, got {type(state).__name__}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except CheckpointError:
        raise
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is not a checkpoint, or is damaged: {reason}") from error
    if _checksum(tensors, header["state"]) != header.get("checksum"):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    return Checkpoint({name: tensor.to(device) for name, tensor in tensors.items()}, state)


def read_checkpoint_state(path: Path) -> dict[str, Any] | None:
    """Return the JSON-compatible state of a checkpoint without reading its tensors; ``None`` if it has none.

    For displaying the progress of a run: the checksum is not verified.
    """
    safetensors = import_optional("safetensors", "a checkpoint")
    try:
        check_regular_file(path)
        with safetensors.safe_open(path, "pt", device="cpu") as file:
            return json.loads((file.metadata() or {})["state"])
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, RecursionError, MemoryError):
        return None


def check_same_run(checkpoint: Checkpoint, spec: RunSpec) -> None:
    """Raise `CheckpointError` if a checkpoint has settings that differ from the run's and can't change on resume."""
    recorded_settings = checkpoint.state.get("config", {})
    if not isinstance(recorded_settings, dict):
        raise CheckpointError(f"its state has no valid settings: {_shorten(recorded_settings)}")
    for name, (recorded, current) in spec.resume_conflicts(recorded_settings).items():
        raise CheckpointError(f"it belongs to a run with {name} {recorded!r}; this run has {current!r}")


def restore_training(
    checkpoint: Checkpoint,
    spec: RunSpec,
    n_images: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: EMA | None,
) -> TrainState:
    """Restore weights, optimizer and EMA of a checkpoint; return the state of its run.

    Args:
        checkpoint: written by `CheckpointWriter.save_last`.
        spec: settings of the run that continues.
        n_images: present number of training images.
        model: its weights are replaced.
        optimizer: its state is replaced.
        ema: its average is replaced, if the run has one.
    """
    check_same_run(checkpoint, spec)
    checkpoint.load_weights(model)
    _check_optimizer_state(spec, optimizer, checkpoint.section("optimizer"))
    load_optimizer_state(optimizer, checkpoint.section("optimizer"))
    state = TrainState.from_plain(checkpoint.state.get("run", {}))
    n_before = checkpoint.state.get("n_images", 0)
    if not isinstance(n_before, int):
        raise CheckpointError(f"its state has no valid number of training images: {_shorten(n_before)}")
    if n_before != n_images:
        raise CheckpointError(f"its training set has {n_before:,} images; the training set now has {n_images:,}")
    if ema is not None:
        if checkpoint.section("ema"):
            checkpoint.check_weights(model, "ema")
        ema.load_state_dict(checkpoint.section("ema"), state.step)
    state.stop_reason = None
    if state.planned_minutes != (spec.max_minutes or 0.0):
        state.planned_steps = 0  # the time limit has changed: estimate again
    return state


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's tensors by parameter index and name: ``0.exp_avg`` belongs to the first parameter."""
    return {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def _check_optimizer_state(spec: RunSpec, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` if the names or shapes of an optimizer's tensors are not those of its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    fresh = spec.recipe.optimizer.make([probe])
    fresh.step()
    expected = {name.partition(".")[2] for name in optimizer_state(fresh)}
    names: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        names.setdefault(index, set()).add(key)
        shape = parameters[int(index)].shape if index.isdecimal() and int(index) < len(parameters) else None
        if shape is None or tensor.shape not in (shape, torch.Size()) or not tensor.is_floating_point():
            raise CheckpointError(f"its optimizer state does not fit the optimizer: {name} is {list(tensor.shape)}")
        if key == "step" and not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
            raise CheckpointError(f"its optimizer state is invalid: {name} must be a number of steps")
    for index, keys in names.items():
        if keys != expected:
            raise CheckpointError(
                f"its optimizer state of parameter {index} has {sorted(keys)}, not {sorted(expected)}"
            )


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"its optimizer state does not fit the optimizer: {error}") from error


def _dtype_kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype; a checkpoint may have another precision than the model, but not another kind."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _unshare(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the CPU, each with its own memory, as safetensors requires."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.detach().cpu().contiguous()
        storage = contiguous.untyped_storage()
        is_alone = storage.nbytes() == contiguous.nbytes and storage.data_ptr() not in seen
        yield name, contiguous if is_alone else contiguous.clone()
        seen.add(storage.data_ptr())


def _checksum(tensors: Mapping[str, Tensor], state: str) -> str:
    """Return the SHA-256 of the tensors (names, dtypes, shapes, bytes) and the state."""
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # no copy
        digest.update(content)
    return digest.hexdigest()
