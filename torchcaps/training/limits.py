"""Limits for the settings of a run from a stranger: they must not exhaust time or memory when the run is opened.

The model is built on the meta device first, where tensors have shapes but no memory.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchcaps._core.machine import memory_limit
from torchcaps.models import Network, create_model
from torchcaps.models.registry import find_model
from torchcaps.profiling.memory import forward_memory
from torchcaps.routing import Routing
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError

__all__ = ["build_model_on_meta", "build_on_meta", "check_training", "limit_batch_size", "max_checkpoint_bytes"]

MAX_PARTS = 10_000  # modules and parameters; registered models have at most a few hundred
MAX_ITERATIONS = 1000  # of a routing
MAX_IMAGE_BYTES = 2**31  # tensors of a forward pass of one image; registered models need at most 129 MiB
MAX_BATCH_BYTES = 2**33  # of a batch
MAX_ELEMENT_BYTES = 8
MAX_STATE_BYTES = 2**26  # header of a checkpoint: names, counters, classes


def build_on_meta(spec: RunSpec) -> Network | None:
    """Return the model of a run on the meta device; ``None`` for own code of a user, which may not support it.

    Raises:
        CheckpointError: if it can't be built, or has too many modules, parameters or iterations.
    """
    own_code = type(find_model(spec.model).spec).__module__.partition(".")[0] != __name__.partition(".")[0]
    if spec.names_own_code or own_code:
        return None
    return build_model_on_meta(spec.model, recipe=spec.recipe, **spec.model_options)


def build_model_on_meta(name: str, **options: Any) -> Network:
    """Return a registered model on the meta device; raises as `build_on_meta`.

    Args:
        name: name of the model.
        options: as for `create_model`.
    """
    try:
        with _limited_parts(), torch.device("meta"):
            model = create_model(name, **options)
    except Exception as error:  # arbitrary sizes raise many types
        raise CheckpointError(f"its model can't be built: {' '.join(str(error).split())}") from error
    for module in model.modules():
        _check_iterations(getattr(module, "routing", None))
    return model.eval()


def check_training(spec: RunSpec) -> Network | None:
    """Return the model of a run on the meta device, as `build_on_meta`, if a training of it can start on this machine.

    Raises:
        CheckpointError: as `build_on_meta`, or if the weights with their gradients and optimizer states need more
            memory than this process may use, or a forward pass of one image more than `MAX_IMAGE_BYTES`.
    """
    model = build_on_meta(spec)
    if model is None:
        return None
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    needed, available = (2 + spec.recipe.optimizer.n_states) * n_bytes, memory_limit()
    if needed > available:
        raise CheckpointError(
            f"training its model needs {needed / 2**30:,.1f} GiB for weights, gradients and optimizer states: "
            f"this process may use {available / 2**30:,.1f} GiB"
        )
    limit_batch_size(model, 1)
    return model


@contextlib.contextmanager
def _limited_parts() -> Iterator[None]:
    """Raise a ValueError if more than `MAX_PARTS` modules and parameters are created: a depth in a file is arbitrary.

    Parameters count as well, because a list of modules is registered only after all of them have been created.
    """
    count = 0

    def register(*_: object) -> None:
        """Count a module or parameter; raise a ValueError if there are too many."""
        nonlocal count
        count += 1
        if count > MAX_PARTS:
            raise ValueError(f"it has more than {MAX_PARTS:,} modules and parameters")

    hooks: list[Any] = [
        nn.modules.module.register_module_module_registration_hook(register),
        nn.modules.module.register_module_parameter_registration_hook(register),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_iterations(routing: Any) -> None:
    """Raise `CheckpointError` if a routing, or one that it contains, has more than `MAX_ITERATIONS`."""
    if not isinstance(routing, Routing):
        return
    for field in dataclasses.fields(routing):
        value = getattr(routing, field.name)
        if isinstance(value, int) and value > MAX_ITERATIONS:
            raise CheckpointError(
                f"its routing {type(routing).__name__} has {field.name} {value:,}: "
                f"at most {MAX_ITERATIONS:,} are accepted in a file of settings"
            )
        _check_iterations(value)


def max_checkpoint_bytes(model: Network) -> int:
    """Return the largest size of a checkpoint of a model: weights, EMA weights, optimizer state and mean image."""
    n_elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    n_copies = 2 + model.recipe.optimizer.n_states
    return MAX_ELEMENT_BYTES * (n_copies * n_elements + math.prod(model.spec.image)) + MAX_STATE_BYTES


def limit_batch_size(model: Network, batch_size: int) -> int:
    """Return a batch size of an evaluation whose forward pass needs at most `MAX_BATCH_BYTES`.

    Args:
        model: the model on the meta device.
        batch_size: largest batch size.

    Raises:
        CheckpointError: if one image needs more than `MAX_IMAGE_BYTES`.
    """
    try:
        one, many = forward_memory(model, 1), 0
        if one <= MAX_IMAGE_BYTES and batch_size > 1:
            many = forward_memory(model, batch_size)
    except Exception as error:  # arbitrary sizes raise many types
        raise CheckpointError(f"its model can't be evaluated: {' '.join(str(error).split())}") from error
    if one > MAX_IMAGE_BYTES:
        raise CheckpointError(
            f"its model needs {one / 2**30:,.1f} GiB of memory per image: "
            f"at most {MAX_IMAGE_BYTES / 2**30:.0f} GiB are accepted in a file of settings"
        )
    if many <= MAX_BATCH_BYTES:
        return batch_size
    return max(1, (MAX_BATCH_BYTES - one) * (batch_size - 1) // (many - one))
