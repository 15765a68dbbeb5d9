"""A model without its numbers: what shapes, arithmetic and memory are told by before anything runs."""

import copy
from typing import TypeVar

from torch import nn

__all__ = ["meta_twin"]

Module = TypeVar("Module", bound=nn.Module)


def meta_twin(model: Module) -> Module:
    """Return a copy of a model on the meta device; its weights are never copied, whatever their size."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)
