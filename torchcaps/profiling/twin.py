"""A copy of a model to be looked into: its own modules, but none of its weights copied, whatever their size."""

import copy
from typing import TypeVar

from torch import nn

__all__ = ["meta_twin", "sharing_twin"]

Module = TypeVar("Module", bound=nn.Module)


def meta_twin(model: Module) -> Module:
    """Return a copy of a model on the meta device: shapes without numbers."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def sharing_twin(model: Module) -> Module:
    """Return a copy of a model that has the very same weights, and none of its hooks."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for module in twin.modules():  # hooks are for whoever set them, and not for what we run
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin
