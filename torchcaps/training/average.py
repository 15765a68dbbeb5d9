"""The average of the weights over training, the late ones weighing most."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchcaps.training.errors import CheckpointError

__all__ = ["Average"]


class Average:
    """``mean = d mean + (1 - d) weights`` after every step, with ``d`` growing to ``decay`` over the first steps, so
    that the weights at the start, which are chance, don't linger: ``d = min(decay, (1 + n) / (10 + n))``.

    Statistics of batch norms are not averaged but taken as they are.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.n_steps = decay, 0
        self._means = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._others = dict(model.named_buffers())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: all of a model's weights."""
        return {**self._means, **self._others}

    def load(self, tensors: Mapping[str, Tensor], n_steps: int) -> None:
        """Go on from what a checkpoint kept after so many steps."""
        if not tensors:
            raise CheckpointError("the checkpoint has no average of the weights: the run kept none")
        for name, mean in self._means.items():
            mean.copy_(tensors[name])
        self.n_steps = n_steps

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take note of the weights after a step."""
        decay = min(self.decay, (1 + self.n_steps) / (10 + self.n_steps))
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self._means.values()), weights, 1 - decay)  # type: ignore[reportPrivateImportUsage]
        self._others = dict(model.named_buffers())
        self.n_steps += 1

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Let a model have the average for a while."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(self._means[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(own[name])
