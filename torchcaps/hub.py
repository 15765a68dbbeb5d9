"""Models as directories in the layout of the Hugging Face Hub: weights, config and model card.

Loading executes nothing: weights are safetensors, and the config contains plain values that are checked as those of a
run directory are. Local directories work offline.
"""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchcaps._core.files import check_regular_file, reason_of, write_atomic
from torchcaps._core.optional import import_optional
from torchcaps._core.serialize import from_plain, to_plain
from torchcaps._core.validation import is_unicode
from torchcaps._core.version import __version__
from torchcaps.models import MODELS, Network, Output, create_model
from torchcaps.training.checkpoint import Checkpoint
from torchcaps.training.limits import build_model_on_meta, limit_batch_size, max_checkpoint_bytes

try:
    from huggingface_hub import PyTorchModelHubMixin
    from huggingface_hub.errors import HFValidationError
except ImportError as error:
    raise ImportError("torchcaps.hub needs huggingface_hub: pip install 'torchcaps[hub]'") from error

__all__ = ["HubError", "HubModel"]

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 2**32


class HubError(ValueError):
    """A directory is not a model of torchcaps, or its config and weights are invalid.

    >>> issubclass(HubError, Exception)
    True
    """


class HubModel(nn.Module, PyTorchModelHubMixin, library_name="torchcaps", tags=["capsule-network"]):
    """A model of torchcaps with ``save_pretrained``, ``from_pretrained`` and ``push_to_hub``.

    Args:
        model: the model. It must be registered, so that its name and fields describe it completely.
        classes: names of the classes; default: their indices.

    >>> import tempfile, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = HubModel(model).save_pretrained(directory)
    ...     loaded = HubModel.from_pretrained(directory)
    >>> loaded.model.spec == model.spec
    True
    """

    def __init__(self, model: Network, classes: tuple[str, ...] | None = None) -> None:
        super().__init__()
        if not isinstance(model, Network) or model.name not in MODELS:
            raise ValueError(f"model must be one of torchcaps.list_models(), got {getattr(model, 'name', model)!r}")
        self.model = model
        self.classes = tuple(str(n) for n in range(model.spec.classes)) if classes is None else tuple(classes)
        if len(self.classes) != model.spec.classes:
            raise ValueError(f"classes must have {model.spec.classes} names, got {len(self.classes)}")

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Return the output of the model for images ``[B, C, H, W]``."""
        return self.model(images, labels, trace)

    def config(self) -> dict[str, Any]:
        """Return name, fields and classes of the model as plain values."""
        fields = to_plain(self.model.spec)
        fields = fields.get("init_args", fields)
        return {
            "library": "torchcaps",
            "version": __version__,
            "model": self.model.name,
            "fields": fields,
            "classes": list(self.classes),
        }

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write weights, config and model card (called by ``save_pretrained`` and ``push_to_hub``)."""
        safetensors = import_optional("safetensors.torch", "saving weights")
        directory = Path(save_directory)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        write_atomic(directory / WEIGHTS, safetensors.save(state))
        write_atomic(directory / CONFIG, json.dumps(self.config(), indent=2) + "\n")
        write_atomic(directory / CARD, self.model_card())

    def model_card(self) -> str:
        """Return the model card: Markdown with the metadata of the Hub."""
        spec = self.model.spec
        size = "x".join(map(str, spec.image))
        lines = ["---", "library_name: torchcaps", "tags:", "- capsule-network", "pipeline_tag: image-classification"]
        lines += ["---", "", f"# {self.model.name}", ""]
        lines += [f"Capsule network of torchcaps {__version__}: {self.model.n_parameters:,} parameters,"]
        lines += [
            f"images of {size}, {spec.classes} classes.",
            "",
            "```python",
            "from torchcaps.hub import HubModel",
            "",
        ]
        lines += ['model = HubModel.from_pretrained("PATH_OR_NAME").eval()', "scores = model(images).scores", "```", ""]
        return "\n".join(lines)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "HubModel":
        """Load a model from a directory or, by its name, from the Hub.

        Args:
            pretrained_model_name_or_path: directory, or name of a repository.
            options: as for `huggingface_hub.ModelHubMixin.from_pretrained`.
        """
        config = Path(pretrained_model_name_or_path) / CONFIG
        if config.parent.is_dir():
            _read_config(config)  # the library would read a FIFO, a file of any size, or raise errors of many types
        name = str(pretrained_model_name_or_path)
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **options)
        except HFValidationError as error:
            raise HubError(f"{name} is neither a directory nor a name of the Hub, such as 'user/model'") from error
        except OSError as error:  # no connection, no such repository or file, no access
            raise HubError(f"{name} can't be loaded from the Hub: {reason_of(error).splitlines()[0]}") from error

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        map_location: str = "cpu",
        strict: bool = True,
        **kwargs: Any,
    ) -> "HubModel":
        """Load a directory or a repository of the Hub (called by ``from_pretrained``)."""
        if os.path.isdir(model_id):
            paths = [Path(model_id) / name for name in (CONFIG, WEIGHTS)]
        else:
            download = import_optional("huggingface_hub", "downloading models").hf_hub_download
            options = {"revision": revision, "cache_dir": cache_dir, "force_download": force_download, "token": token}
            options["local_files_only"] = local_files_only
            paths = [Path(download(model_id, name, **options)) for name in (CONFIG, WEIGHTS)]
        config = _read_config(paths[0])
        model = _build(config, *paths)
        if len(config["classes"]) != model.spec.classes:
            n = len(config["classes"])
            raise HubError(f"{paths[0]} names {n} classes, its model has {model.spec.classes}")
        _load_weights(model, paths[1])
        return cls(model.to(map_location), tuple(config["classes"]))


def _read_config(path: Path) -> dict[str, Any]:
    """Return the checked content of ``config.json``."""
    try:
        check_regular_file(path, MAX_CONFIG_BYTES)
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HubError(f"{path} can't be read: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not valid JSON") from error
    kinds = {"model": str, "fields": dict, "classes": list}
    for key, kind in kinds.items():
        if not isinstance(config, dict) or not isinstance(config.get(key), kind):
            raise HubError(f"{path} must contain {key!r}, as HubModel.save_pretrained writes it")
    if not all(isinstance(name, str) and is_unicode(name) for name in config["classes"]):
        raise HubError(f"{path} must contain the names of the classes as strings")
    return config


def _build(config: dict[str, Any], path: Path, weights: Path) -> Network:
    """Build the model of a config: only registered models and routings, no import paths."""
    if config["model"] not in MODELS:
        raise HubError(f"{path} names the model {str(config['model'])[:100]!r}, which is not registered")
    spec_class = type(MODELS.get(config["model"]).spec)
    try:
        spec = from_plain(spec_class, config["fields"])
        fields = {name: getattr(spec, name) for name in config["fields"]}
        meta = build_model_on_meta(config["model"], **fields)
        limit_batch_size(meta, 1)
        if not weights.is_file() or meta.n_parameters * 2 > weights.stat().st_size:  # at least, in half precision
            raise HubError(f"{weights} is missing or too small for the model of {path.name}")
        if weights.stat().st_size > max_checkpoint_bytes(meta):
            raise HubError(f"{weights} is larger than the weights of the model of {path.name}")
        return create_model(config["model"], **fields)  # memory is allocated here
    except HubError:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, RecursionError) as error:
        raise HubError(f"{path} has invalid fields: {' '.join(str(error).split())[:200]}") from error


def _load_weights(model: Network, path: Path) -> None:
    """Load safetensors into a model; raise a `HubError` if names or shapes differ."""
    safetensors = import_optional("safetensors.torch", "loading weights")
    try:
        check_regular_file(path, MAX_WEIGHT_BYTES)
        Checkpoint(_prefix(safetensors.load(path.read_bytes())), {}).load_weights(model)
    except OSError as error:
        raise HubError(f"{path} can't be read: {reason_of(error)}") from error
    except Exception as error:  # safetensors and torch raise several types
        reason = " ".join(str(error).split())[:200]
        raise HubError(f"{path} does not contain the weights of the model: {reason}") from error


def _prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names that they have in a checkpoint."""
    return {f"model.{name}": tensor for name, tensor in tensors.items()}
