"""A network that takes pixels in 0..1, so that a perturbation has the same scale for all networks."""

import dataclasses

import torch
from torch import Tensor, nn

from torchcaps._core.random import CounterRNG
from torchcaps.data import Pipeline, ScalePixels
from torchcaps.data.base import ImageShape
from torchcaps.models import Network, Output

__all__ = ["PixelNetwork"]


class PixelNetwork(Network):
    """A network with its preprocessing as the first layer: it takes pixels in 0..1.

    Attacks need the bounds of a pixel. After mean subtraction or standardisation they differ between pixels or are
    unknown, and images crafted against one network would not be the ones that another, with its own pipeline, sees.
    Here all networks take the same pixels, ``eps`` is in their scale, and gradients flow through the pipeline.

    Args:
        model: the network; shared, not copied.
        pipeline: its preprocessing. The test steps are used, which are deterministic.
        shape: shape of the data set's images, ``(channels, height, width)``.

    Attributes:
        pipeline: the steps from a data set's images to these pixels: those before the first that changes colours, such
            as crops.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.data import create_pipeline
    >>> network = PixelNetwork(model, create_pipeline("sabour2017.mnist"), (1, 28, 28))
    >>> network(torch.rand(2, 1, 28, 28)).scores.shape
    torch.Size([2, 10])
    """

    def __init__(self, model: Network, pipeline: Pipeline, shape: ImageShape) -> None:
        nn.Module.__init__(self)  # not Network.__init__, which builds layers
        steps = pipeline.transforms(False)
        n_before = next((n for n, step in enumerate(steps) if not step.applies_to_targets), len(steps))
        scales = [step.scale for step in steps[:n_before] if isinstance(step, ScalePixels)]
        if len(scales) != 1:
            raise ValueError(
                "pipeline must convert bytes to floating-point numbers (ScalePixels) before any step that changes "
                f"colours, or the bounds of a pixel are unknown; got the test steps {steps}"
            )
        before = [ScalePixels() if isinstance(step, ScalePixels) else step for step in steps[:n_before]]
        self.pipeline = Pipeline(before, before)
        self.model, self.steps, self.factor = model, steps[n_before:], 255 / scales[0]
        spec = dataclasses.replace(model.spec, image=self.pipeline.output_shape(shape, train=False))
        self.set_origin(spec, model.name, model.recipe, model.n_objects)

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Return the network's output for pixels in 0..1."""
        if self.factor != 1:
            images = images * self.factor
        rng = CounterRNG(0, 0, torch.arange(len(images)))
        for step in self.steps:
            images = step(images, rng)
        return self.model(images, labels, trace)
