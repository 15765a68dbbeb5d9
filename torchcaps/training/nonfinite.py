"""Diagnosis of non-finite values (NaN, infinity): which module, weight or gradient produced the first one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchcaps._core.validation import DomainError
from torchcaps.data import Batch
from torchcaps.models import Network
from torchcaps.training.errors import DivergenceError

__all__ = ["check_weights", "diagnose_step", "first_nonfinite"]


def diagnose_step(
    model: Network, loss: nn.Module, batch: Batch, step: int, seed: int, status: str, error: Exception | None = None
) -> None:
    """Raise `DivergenceError` that names the source of a non-finite value in a training step.

    Args:
        model: the network, with the weights before the step.
        loss: the training loss.
        batch: the batch of the step.
        step: number of completed steps.
        seed: RNG seed of the step.
        status: sentence about the last good checkpoint.
        error: exception of the step, if a module rejected its input. If every value is finite, this returns, since the
            exception has another cause, unless it is a `DomainError`: values so large that gradients could overflow.
    """
    model.zero_grad()
    source = first_nonfinite(model, loss, batch, step, seed)
    if not source and isinstance(error, DomainError):
        raise DivergenceError(f"step {step + 1:,}: {error}. {status} Try a lower --lr or --max-grad-norm 1") from error
    if source or error is None:
        raise DivergenceError(
            f"step {step + 1:,}: non-finite value first produced by {source or 'another process'}. {status} "
            "Try a lower --lr or --max-grad-norm 1",
            secondary=not source,
        ) from error


def check_weights(model: nn.Module, step: int, status: str) -> None:
    """Raise `DivergenceError` if a weight is non-finite: such weights must not replace a good checkpoint."""
    for name, tensor in model.state_dict().items():
        if not _is_finite(tensor):
            raise DivergenceError(
                f"step {step:,}: non-finite value first produced by the optimizer step, in the weights {name}. "
                f"{status} Try a lower --lr"
            )


def first_nonfinite(model: Network, loss: nn.Module, batch: Batch, step: int, seed: int) -> str:
    """Return the source of the first non-finite value of a step, or ``""`` if all values are finite.

    Forward and backward pass are repeated with the same RNG seed. The source is one of: the input images, a weight, a
    layer with finite inputs, the loss, a gradient.

    Args:
        model: the network, with the weights before the step.
        loss: the training loss.
        batch: the batch of the step.
        step: number of completed steps, for the margin schedule of the loss.
        seed: RNG seed of the step.
    """
    if not _is_finite(batch.images):
        return "the input images"
    for name, weights in [*model.named_parameters(), *model.named_buffers()]:
        if not _is_finite(weights):
            return f"the weights {name}"
    layers: list[str] = []  # with non-finite outputs, in the order of execution

    def make_hook(name: str) -> Any:
        """Return a forward hook that appends ``name`` to ``layers`` if the module's output is non-finite."""

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not all(_is_finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
                layers.append(name)

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    leaves = [(name, module) for name, module in named if not any(True for _ in module.children())]
    routed = [(name, module) for name, module in named if hasattr(module, "routing")]
    handles = [module.register_forward_hook(make_hook(name)) for name, module in [*leaves, *routed]]
    torch.manual_seed(seed)
    value = None
    try:
        output = model(batch.images, batch.labels)
        value = loss(output, batch.labels, batch.targets, step)
    except ValueError:  # a layer rejected the output of the one before, or there is another cause
        if not layers:
            return ""
    finally:
        for handle in handles:
            handle.remove()
    if layers:
        return f"the layer {layers[0]}"
    if value is None or not _is_finite(value):
        return "the loss"
    model.zero_grad()
    value.backward()
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    # The backward pass runs from the loss to the images: the last parameter got its gradient first.
    return f"the gradient of {gradients[-1]}" if gradients else ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
