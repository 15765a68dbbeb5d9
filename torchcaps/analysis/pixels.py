"""A model that takes pixels in 0..1, so that a change of so many grey levels means the same to all models."""

import dataclasses

import torch
from torch import Tensor, nn

from torchcaps._core.random import CounterRNG
from torchcaps.data import Pipeline, ScalePixels
from torchcaps.data.base import ImageShape
from torchcaps.models import Network, Output

__all__ = ["PixelNetwork"]


class PixelNetwork(Network):
    """A model with what is done to the colours of its images as its first layer: it takes pixels in 0..1.

    Attacks need bounds of a pixel. Of images with a mean taken off, or over their own deviation, these differ from
    pixel to pixel, or are not known; and images that were made against one model would not be those that another, with
    a pipeline of its own, sees. Here all models take the same pixels, eps is in their scale, and gradients go
    through the pipeline.

    Args:
        model: the model; it is shared, not copied.
        pipeline: how its images are prepared. The steps for testing are taken, which leave nothing to chance.
        shape: of the data set's images.

    Attributes:
        pipeline: what a data set's images go through to become these pixels: the steps before the first that changes
            colours, such as crops.
    """

    def __init__(self, model: Network, pipeline: Pipeline, shape: ImageShape) -> None:
        nn.Module.__init__(self)  # no layers of its own
        steps = pipeline.transforms(False)
        n_before = next((n for n, step in enumerate(steps) if not step.applies_to_targets), len(steps))
        scales = [step.scale for step in steps[:n_before] if isinstance(step, ScalePixels)]
        if len(scales) != 1:
            raise ValueError("pixels with known bounds need a pipeline that makes numbers of bytes before all else")
        before = [ScalePixels() if isinstance(step, ScalePixels) else step for step in steps[:n_before]]
        self.pipeline = Pipeline(before, before)
        self.model, self.steps, self.factor = model, steps[n_before:], 255 / scales[0]
        self.spec = dataclasses.replace(model.spec, image=self.pipeline.output_shape(shape, train=False))
        self.name, self.recipe, self.n_objects = model.name, model.recipe, model.n_objects

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Make an `Output` of pixels in 0..1."""
        if self.factor != 1:
            images = images * self.factor
        draws = CounterRNG(0, 0, torch.arange(len(images)))
        for step in self.steps:
            images = step(images, draws)
        return self.model(images, labels, trace)
