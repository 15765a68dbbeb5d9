"""Ascent on routing coefficients, alternating with the optimiser steps: Yang 2021, Algorithm 1."""

import contextlib
from collections.abc import Callable

from torch import Tensor

from torchcaps.models import Network
from torchcaps.models.recipe import Recipe
from torchcaps.routing import Quadratic
from torchcaps.routing.quadratic import RecordedChildren

__all__ = ["CoefficientAscent"]


class CoefficientAscent:
    """Ascent steps of a model with `torchcaps.routing.Quadratic` routing, as its recipe defines them.

    Algorithm 1 alternates ``recipe.descents`` optimiser steps and ``recipe.ascents`` ascent steps. Without ascents in
    the recipe, nothing happens.

    Args:
        network: the model.
        recipe: its training settings.
    """

    def __init__(self, network: Network, recipe: Recipe) -> None:
        self.network, self.recipe = network, recipe

    def is_due(self, step: int) -> bool:
        """Return whether ascent steps follow the optimiser step with this index."""
        return self.recipe.ascents > 0 and (step + 1) % self.recipe.descents == 0

    def recording(self, step: int) -> contextlib.AbstractContextManager[RecordedChildren | None]:
        """Context manager for the forward passes of an optimiser step: keep the children, if the ascent reuses them."""
        if self.recipe.reuse_children and self.is_due(step):
            return Quadratic.record_children(self.network)
        return contextlib.nullcontext()

    def run(
        self,
        recorded: RecordedChildren | None,
        images: Tensor,
        labels: Tensor,
        step: int,
        lr_factor: float,
        n_images: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the ascent steps that are due after an optimiser step.

        Args:
            recorded: children that `recording` has kept; ``None``: run the model on ``images``.
            images: the batch of the optimiser step.
            labels: its labels.
            step: index of the optimiser step.
            lr_factor: factor of the learning-rate schedule, used if ``recipe.ascent_lr`` is ``"scheduled"``.
            n_images: number of images of the global batch, as in `Quadratic.ascend`.
            reduce: sum over processes, as in `Quadratic.ascend`.
        """
        if not self.is_due(step):
            return
        factor = lr_factor if self.recipe.ascent_lr == "scheduled" else 1.0
        for _ in range(self.recipe.ascents):
            if recorded is None:
                Quadratic.ascend(self.network, images, labels, n_images, reduce, factor)
            else:
                recorded.ascend(labels, n_images, reduce, factor)
