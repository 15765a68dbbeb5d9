"""Dropout whose mask belongs to an image, not to its position in a batch, a micro-batch or a process.

Torch's dropout draws its mask from a generator, in the order of the batch. If a batch is divided between processes,
each draws for its own images, so the result depends on the number of processes. Inside `image_dropout` the mask of an
image is a function of (seed, step, index of the image) instead.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps._core.random import CounterRNG

__all__ = ["ImageDropout", "apply_dropout", "image_dropout"]

_rng: CounterRNG | None = None  # of the enclosing `image_dropout`; not a ContextVar, which torch.compile can't trace


@contextlib.contextmanager
def image_dropout(seed: int, step: int, indices: Tensor) -> Iterator[None]:
    """Context manager for one forward pass, in which dropout masks are functions of the images.

    Args:
        seed: seed of the run.
        step: number of the training step.
        indices: indices of the batch's images in the data set, ``[B]``.

    >>> layer = ImageDropout(0.5)
    >>> with image_dropout(0, 7, torch.tensor([4, 5, 6])):
    ...     batch = layer(torch.ones(3, 8))
    >>> with image_dropout(0, 7, torch.tensor([6])):
    ...     bool((layer(torch.ones(1, 8)) == batch[2]).all())
    True
    """
    global _rng
    previous, _rng = _rng, CounterRNG(seed, step, indices, "dropout")
    try:
        yield
    finally:
        _rng = previous


def apply_dropout(x: Tensor, p: float) -> Tensor:
    """Zero elements with probability ``p`` and divide the others by ``1 - p``.

    Inside `image_dropout` the mask of each image is a function of the image, of the step and of the number of calls
    before in this forward pass. Otherwise, and if ``x`` does not have the same number of rows for each image, it is
    drawn from torch's generator, as by `torch.nn.functional.dropout`.

    Shapes:
        x: ``[B * k, ...]``, the rows of an image next to each other; usually ``k`` is 1.
    """
    if torch.compiler.is_compiling() or _rng is None or len(_rng) == 0 or x.shape[0] % len(_rng):
        return F.dropout(x, p)
    if p >= 1:
        return x * 0
    keep = _rng.bernoulli_rows(x.numel() // len(_rng), 1 - p, x.device).view(x.shape)
    return x * keep.to(x.dtype).mul_(1 / (1 - p))


class ImageDropout(nn.Dropout):
    """`torch.nn.Dropout` with masks of images inside `image_dropout`; elsewhere the same as `torch.nn.Dropout`.

    >>> import torch
    >>> ImageDropout(0.5).eval()(torch.ones(2, 3))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout in training mode."""
        return apply_dropout(input, self.p) if self.training and self.p else input
