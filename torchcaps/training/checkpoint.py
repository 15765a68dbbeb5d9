"""Checkpoints: one file of tensors and plain numbers, written whole or not at all, that executes nothing when read.

Tensors are in the safetensors format. What else there is to know stands in its header as JSON, with a checksum of the
tensors, since a file whose bytes have changed would otherwise be read without a word.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps._core.files import move_into_place, staging_directory, sync_file
from torchcaps._core.optional import import_optional
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError, RunError

__all__ = [
    "Checkpoint",
    "optimizer_tensors",
    "prefixed",
    "read_checkpoint",
    "refuse_foreign",
    "restore_optimizer",
    "write_checkpoint",
]

FORMAT = "torchcaps checkpoint 1"


class Checkpoint(NamedTuple):
    """What a file holds.

    Args:
        tensors: by name, ``model.front.conv1.weight``.
        state: plain numbers and words.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with a word, without it."""
        return {name[len(prefix) + 1 :]: t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}

    def load_weights(self, model: nn.Module, part: str = "model") -> None:
        """Put weights into a model; refuse those of another one."""
        weights = self.part(part)
        own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if own != found:
            odd = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))[0]
            there = f"{list(found[odd])}" if odd in found else "none"
            wanted = f"{list(own[odd])}" if odd in own else "none"
            raise CheckpointError(f"its weights are those of another model: {odd} is {there}, the model's is {wanted}")
        model.load_state_dict(weights)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under names that begin with a word."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], previous: Path | None = None
) -> None:
    """Write a checkpoint: it is on the disk when this returns, and until then the one before stands.

    Args:
        path: where.
        tensors: what it holds, by name.
        state: what else.
        previous: what the file that stands there now is called afterwards; without it, it is gone.
    """
    safetensors = import_optional("safetensors.torch", "a checkpoint")
    own = dict(_unshared(tensors))
    words = json.dumps(state)
    header = {"format": FORMAT, "state": words, "checksum": _checksum(own, words)}
    try:
        with staging_directory(path.parent, sweep=False) as place:
            safetensors.save_file(own, place / path.name, header)
            sync_file(place / path.name)  # a full disk may show only now: the old one is not touched before
            if previous is not None and path.exists():
                os.replace(path, previous)
            move_into_place(place / path.name, path)
            sync_folder(path.parent)
    except (OSError, import_optional("safetensors", "a checkpoint").SafetensorError) as error:
        reason = str(error).removeprefix("Error while serializing: I/O error: ").partition(" (os error")[0]
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise RunError(f"{path} can't be written: {reason}") from error


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint, after it was seen to be whole."""
    safetensors = import_optional("safetensors", "a checkpoint")
    try:
        with safetensors.safe_open(path, "pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is no checkpoint of torchcaps: it doesn't say {FORMAT!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        state = json.loads(header["state"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is no checkpoint, or a broken one: {reason}") from error
    if _checksum(tensors, header["state"]) != header.get("checksum"):
        raise CheckpointError(f"{path} is broken: it doesn't have the checksum that it was written with")
    return Checkpoint({name: tensor.to(device) for name, tensor in tensors.items()}, state)


def refuse_foreign(checkpoint: Checkpoint, spec: RunSpec) -> None:
    """Raise a CheckpointError if a checkpoint has settings that differ from the run's and can't change on resume."""
    for name, (recorded, current) in spec.resume_conflicts(checkpoint.state.get("config", {})).items():
        raise CheckpointError(f"it is of a run with {name} {recorded!r}, and this one has {current!r}")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what an optimiser keeps beside the parameters, ``0.exp_avg`` for the first of them."""
    kept = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in kept.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser back what it kept."""
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, tensor in tensors.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"what its optimiser kept can't be taken: {error}") from error


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk, where the system can be asked to."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unshared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Give tensors on the CPU, each with memory of its own, as the format wants them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        whole = own.untyped_storage().nbytes() == own.nbytes
        yield name, own if whole and storage not in seen else own.clone()
        seen.add(storage)


def _checksum(tensors: Mapping[str, Tensor], words: str) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # no copy
        digest.update(content)
    return digest.hexdigest()
