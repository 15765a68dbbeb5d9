"""Exponential moving average of the weights."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchcaps.training.errors import CheckpointError

__all__ = ["EMA"]


class EMA:
    """Exponential moving average (EMA) of a model's parameters, updated after every step.

    ``mean = d mean + (1 - d) weights`` with ``d = min(decay, (1 + n) / (10 + n))`` after ``n`` updates: the decay is
    small at first, so that the random initial weights are forgotten quickly.

    Buffers, such as the running statistics of batch normalization, are not averaged: their current values are used.

    Args:
        model: its parameters are the initial average.
        decay: largest value of ``d``, in 0..1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.n_updates = decay, 0
        self._means = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._buffers = dict(model.named_buffers())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Include the weights after an optimizer step."""
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self._means.values()), weights, 1 - decay)  # type: ignore[reportPrivateImportUsage]
        self._buffers = dict(model.named_buffers())
        self.n_updates += 1

    @contextlib.contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which the model has the EMA weights; its own are restored on exit."""
        original = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(self._means[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(original[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return a complete state dict of the model: averaged parameters and current buffers."""
        return {**self._means, **self._buffers}

    def load_state_dict(self, tensors: Mapping[str, Tensor], n_updates: int) -> None:
        """Restore the average of a checkpoint.

        Args:
            tensors: what `state_dict` returned.
            n_updates: number of updates they include.
        """
        if not tensors:
            raise CheckpointError("the checkpoint has no EMA weights: its run was trained without them")
        for name, mean in self._means.items():
            mean.copy_(tensors[name])
        self.n_updates = n_updates
