"""Files of settings (``config.yaml``): reading YAML, and a check that no name in them imports code.

A file from a stranger is data. It may name models, data sets, routings and schedules that are registered in this
process. Anything else would be imported, which executes code, and needs ``trust_remote_code``, which is a flag of the
command line and an argument in Python, never a setting in a file.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps._core.files import check_regular_file, reason_of
from torchcaps._core.machine import available_cores
from torchcaps._core.optional import import_optional
from torchcaps._core.registry import UntrustedCodeError, is_import_path
from torchcaps._core.serialize import find_class
from torchcaps.data.registry import DATASETS, is_image_folder
from torchcaps.data.storage import data_root
from torchcaps.models.registry import MODELS

if TYPE_CHECKING:
    from torchcaps.training.config import RunSpec

__all__ = ["RESOURCES", "check_registered", "limit_resources", "may_download", "read_settings"]

MAX_BYTES = 2**20  # the config.yaml of a run has about 2 KiB
MAX_NODES = 100_000  # values in a file; aliases and merge keys can multiply a few lines to billions of values
MAX_NUMBER_CHARS = 1000  # the time to parse a number with colons (base 60) grows with the square of its length
RESOURCES = ("devices", "num_threads", "num_workers")
MIN_RESOURCE_LIMIT = 8  # accepted on any machine
CLASS_KEYS = {"class_path", "init_args", "lr_schedule", "routing"}  # their values may be names of classes


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a YAML file; raise a ValueError if it can't be read or is not a mapping."""
    yaml = import_optional("yaml", "a file of settings")
    file = Path(path).expanduser()
    try:
        check_regular_file(file)  # reading a FIFO would wait forever
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path} is too large for a file of settings: {size:,} bytes, at most {MAX_BYTES:,}")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    try:
        values = _load_yaml(text)
        _check_plain(values)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path} is not a YAML file: {problem or 'it cannot be parsed'}{line}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not a file of settings: its values are nested too deeply") from error
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:  # of values such as dates
        raise ValueError(f"{path} is not a file of settings: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of settings, such as 'epochs: 5', got {type(values).__name__}")
    return values


def limit_resources(spec: "RunSpec", names: Collection[str] = RESOURCES) -> tuple["RunSpec", list[str]]:
    """Limit the processes and threads that a file of settings asks for to one per core, or 8 if there are fewer cores.

    Args:
        spec: settings of a run.
        names: settings that the file decides; others, which the user has given, are not limited.

    Returns:
        The settings, and a message for each one that was changed.
    """
    limit = max(MIN_RESOURCE_LIMIT, available_cores())
    values = {name: getattr(spec, name) for name in names}
    excess = {name: value for name, value in values.items() if value is not None and value > limit}
    notes = [
        f"{name} {value:,} is limited to {limit}: give --{name.replace('_', '-')} for more"
        for name, value in excess.items()
    ]
    return dataclasses.replace(spec, **dict.fromkeys(excess, limit)), notes


def may_download(data_dir: str | None) -> bool:
    """Return whether missing data may be downloaded to a directory that a file of settings names.

    The file may decide from which directory data is read. Files are written to the user's own data directory only.
    """
    return data_dir is None or Path(data_dir).expanduser().resolve() == data_root().resolve()


def _load_yaml(text: str) -> Any:
    """Return the values in a YAML document; raise a ValueError before values are created if there are too many.

    `yaml.safe_load` copies the keys of a mapping each time that another one merges it (``<<``), which can need any
    amount of memory.
    """
    loader = _open_yaml(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _open_yaml(text: str) -> Any:
    """Return a loader of plain values that raises a ValueError at the first of too many nodes."""
    yaml = import_optional("yaml", "a file of settings")

    class Loader(yaml.SafeLoader):
        n_nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Return the next node; raise a ValueError if there are too many."""
            self.n_nodes += 1
            if self.n_nodes > MAX_NODES:
                raise ValueError(f"it has more than {MAX_NODES:,} values")
            return super().compose_node(parent, index)

    return Loader(text)


def _count_nodes(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values of a YAML node, with those that aliases repeat; raise a ValueError if too many.

    Args:
        node: the node.
        counts: number of values of the nodes that have been counted, by their id; 0 while a node is being counted.
    """
    if id(node) in counts:
        if not counts[id(node)]:
            raise ValueError("a value contains itself")
        return counts[id(node)]
    counts[id(node)], count = 0, 1
    if isinstance(node.value, str):
        if not node.tag.endswith(":str") and len(node.value) > MAX_NUMBER_CHARS:
            raise ValueError(f"a number has {len(node.value):,} characters")
    else:
        for child in node.value:
            count += sum(_count_nodes(part, counts) for part in (child if isinstance(child, tuple) else (child,)))
            if count > MAX_NODES:
                raise ValueError(f"it has more than {MAX_NODES:,} values")
    counts[id(node)] = count
    return count


def _check_plain(values: Any) -> None:
    """Raise a ValueError if nested values are not those of a file of settings: dates, sets, or YAML that multiplies."""
    if isinstance(values, Mapping):
        for value in values.values():
            _check_plain(value)
    elif isinstance(values, list):
        for value in values:
            _check_plain(value)
    elif isinstance(values, str):
        _check_string(values)
    elif not isinstance(values, bool | int | float | None):
        raise ValueError(f"a setting must be a number, a string, a list or a mapping, got {type(values).__name__}")


def _check_string(text: str) -> None:
    """Raise a ValueError if a string, parsed as YAML like the value of a flag, has too many values."""
    if "&" not in text or "*" not in text:  # without anchors and aliases, it is not larger than the file
        return
    loader = _open_yaml(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _count_nodes(node, {})
    except import_optional("yaml", "a file of settings").YAMLError:
        return  # it stays a string
    finally:
        loader.dispose()


def check_registered(values: Mapping[str, Any]) -> None:
    """Raise `UntrustedCodeError` if settings name a model, data set, routing or schedule that is not registered.

    Args:
        values: settings as in ``config.yaml``, or as in a file for ``torchcaps train --config``, which may also have
            keys such as ``routing.class-path``.
    """
    for key, value in values.items():
        parts = _key_parts(key)
        if parts == ["model"] and is_import_path(value) and value not in MODELS:
            raise UntrustedCodeError(value, "model")
        is_dataset = parts in (["data"], ["test_data"])
        if is_dataset and is_import_path(value) and value not in DATASETS and not is_image_folder(value):
            raise UntrustedCodeError(value, "data set")
        _check_classes(value, ".".join(parts), bool(CLASS_KEYS & set(parts)))


def _check_classes(value: Any, key: str, is_class: bool) -> None:
    """Raise `UntrustedCodeError` if a string below a key of classes is neither a name, a number nor a known class.

    Any other string may become an import path later, for example JSON with an escaped dot.
    """
    if isinstance(value, Mapping):
        if not isinstance(value.get("class_path", ""), str | list):
            raise ValueError(f"{key}.class_path must be an import path, got {value['class_path']!r}")
        for name, item in value.items():
            _check_classes(item, f"{key}.{name}", is_class or bool(CLASS_KEYS & set(_key_parts(name))))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_classes(item, key, is_class)
    elif is_class and isinstance(value, str):
        is_name = re.fullmatch(r"[\w-]*", value) is not None
        if not is_name and not _is_number(value) and find_class(value) is None:
            raise UntrustedCodeError(value, key)


def _key_parts(key: Any) -> list[str]:
    return str(key).replace("-", "_").split(".")


def _is_number(text: str) -> bool:
    """Return whether a text is a number in the syntax of `float`."""
    try:
        float(text)
    except ValueError:
        return False
    return True
