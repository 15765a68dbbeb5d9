"""Pretrained weights, which are part of the package: safetensors files with a model card.

A model ``name`` has the files ``name.safetensors`` (all weights but the decoder's), ``name.decoder.safetensors`` (the
decoder, in half precision; optional) and ``name.md``, the model card. The header of the first file contains the field
values of the spec that the weights belong to.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps._core.files import atomic_path
from torchcaps._core.optional import import_optional
from torchcaps._core.serialize import to_plain

if TYPE_CHECKING:
    from torchcaps.models.network import Network

__all__ = ["has_pretrained_decoder", "list_pretrained", "load_pretrained", "model_card", "save_pretrained"]

DIRECTORY = Path(__file__).resolve().parent.parent / "pretrained"
DECODER = "decoder."
DECODER_SUFFIX = ".decoder.safetensors"
# Fields of a spec that do not change the weights of the encoder.
FREE_FIELDS = ("reconstruction", "hidden", "streamed", "preset")


def list_pretrained() -> list[str]:
    """Return the names of the models with pretrained weights, sorted.

    >>> isinstance(list_pretrained(), list)
    True
    """
    return sorted(path.stem for path in DIRECTORY.glob("*.safetensors") if "." not in path.stem)


def has_pretrained_decoder(name: str) -> bool:
    """Return whether the package has weights of a model's decoder, for ``reconstruction=True``."""
    return (DIRECTORY / f"{name}{DECODER_SUFFIX}").is_file()


def model_card(name: str) -> str:
    """Return the model card of pretrained weights, as Markdown: data, recipe, accuracy, command and licence.

    >>> "99.69" in model_card("mazzia2021_mnist")
    True
    """
    _check_available(name)
    return (DIRECTORY / f"{name}.md").read_text(encoding="utf-8")


def load_pretrained(model: "Network") -> None:
    """Load the pretrained weights of a model by its name.

    Raises:
        ValueError: if there are none, if they belong to other field values of the spec, or if the model has a decoder
            and they do not.
    """
    _check_available(model.name)
    expected, (weights, metadata) = _spec_fields(model), _read(DIRECTORY / f"{model.name}.safetensors")
    trained = json.loads(metadata["spec"])
    changed = sorted(field for field in expected if expected[field] != trained.get(field, expected[field]))
    if changed:
        values = ", ".join(f"{field}={trained[field]!r}" for field in changed)
        given = ", ".join(f"{field}={expected[field]!r}" for field in changed)
        raise ValueError(f"the pretrained weights of {model.name} are for {values}, got {given}: use pretrained=False")
    if any(key.startswith(DECODER) for key in model.state_dict()):
        if not has_pretrained_decoder(model.name):
            raise ValueError(f"the pretrained weights of {model.name} have no decoder: use reconstruction=False")
        decoder, _ = _read(DIRECTORY / f"{model.name}{DECODER_SUFFIX}")
        weights |= {key: tensor.float() for key, tensor in decoder.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the pretrained weights of {model.name} do not fit its layers: {reason}") from None


def save_pretrained(model: "Network", card: str, directory: Path = DIRECTORY) -> list[Path]:
    """Write the weights of a model as pretrained weights, and their model card; return the files.

    Args:
        model: the trained model.
        card: model card, Markdown.
        directory: directory of the files; by default that of the package.
    """
    safetensors = import_optional("safetensors.torch", "pretrained weights")
    metadata = {"spec": json.dumps(_spec_fields(model))}
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
    parts: dict[str, dict[str, Tensor]] = {
        f"{model.name}.safetensors": {k: t for k, t in state.items() if not k.startswith(DECODER)},
        f"{model.name}{DECODER_SUFFIX}": {k: t.half() for k, t in state.items() if k.startswith(DECODER)},
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, tensors in parts.items():
        if tensors:
            with atomic_path(directory / name) as temporary:
                safetensors.save_file(tensors, temporary, metadata)
            paths.append(directory / name)
    with atomic_path(directory / f"{model.name}.md") as temporary:
        temporary.write_text(card, encoding="utf-8")
    return [*paths, directory / f"{model.name}.md"]


def _check_available(name: str) -> None:
    """Raise a ValueError if a model has no pretrained weights."""
    if name not in list_pretrained():
        available = ", ".join(list_pretrained()) or "none"
        raise ValueError(f"{name} has no pretrained weights; models with weights: {available}")


def _spec_fields(model: "Network") -> dict[str, Any]:
    """Return the field values of a model's spec that its encoder depends on, as JSON values."""
    return {name: value for name, value in to_plain(model.spec).items() if name not in FREE_FIELDS}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file."""
    safetensors = import_optional("safetensors", "pretrained weights")
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        with torch.no_grad():
            return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118, not a mapping
