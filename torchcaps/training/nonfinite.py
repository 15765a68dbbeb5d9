"""Where the first value that is no number arose."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchcaps.data import Batch
from torchcaps.models import Network

__all__ = ["first_nonfinite"]


def first_nonfinite(model: Network, loss: nn.Module, batch: Batch, step: int, chance: int) -> str:
    """Return in a few words where a step went wrong: in the images, in a layer's weights, in what it made of finite
    input, in the loss, or in the gradients of a layer; nothing where all of it is finite.

    The step is taken again, with the same chance, and every layer looked at.

    Args:
        model: the network, its weights as they were.
        loss: the objective.
        batch: the images.
        step: which step of training it is.
        chance: the seed that the step was taken with.
    """
    if not _finite(batch.images):
        return "the images themselves"
    for name, weights in [*model.named_parameters(), *model.named_buffers()]:
        if not _finite(weights):
            return f"the weights {name}"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not all(_finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
                found.append(f"the layer {name}")

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if name and not any(True for _ in m.children())]
    handles = [module.register_forward_hook(look(name)) for name, module in leaves]
    handles += [
        module.register_forward_hook(look(name))
        for name, module in model.named_modules()
        if name and hasattr(module, "routing")
    ]
    torch.manual_seed(chance)
    value = None
    try:
        output = model(batch.images, batch.labels)
        value = loss(output, batch.labels, batch.targets, step)
    except ValueError:  # a layer refuses at its door what the one before it made; or something else is wrong
        if not found:
            return ""
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if value is None or not _finite(value):
        return "the loss"
    model.zero_grad()
    value.backward()
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    # Backward goes from the loss to the images, so the last of them was the first.
    return f"the gradient of {bad[-1]}" if bad else ""


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
