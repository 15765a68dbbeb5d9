"""A digit on a photograph, brought into the form that MNIST's digits have."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.errors import DataError

__all__ = ["centred_ink"]

BOX = 20  # MNIST's digits fit a box of 20x20 (LeCun 1998, section III.A)
FAINT = 0.15  # of the strongest ink: what is fainter is paper


def centred_ink(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the ink of an image in a box of 20x20, its centre of mass in the middle, as MNIST's digits were made.

    Args:
        pixels: bright on dark, ``[1, H, W]`` in bytes.
        size: height and width of the result.

    Shapes:
        ``-> [1, *size]``, bytes
    """
    image = pixels.float()[0]
    ink = (image - _background(image)).clamp(min=0)
    if float(ink.max()) < 25:
        raise DataError("there is no ink in it that stands out from its background")
    there = ink > FAINT * ink.max()
    ink = torch.where(there, ink, 0) * (255 / ink.max())
    rows, columns = there.any(1).nonzero()[:, 0], there.any(0).nonzero()[:, 0]
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = BOX / max(cut.shape)
    small = [max(1, round(side * scale)) for side in cut.shape]
    drawn = F.interpolate(cut[None, None], small, mode="bilinear", antialias=True)[0, 0].clamp(0, 255)
    height, width = size
    mass = float(drawn.sum())  # MNIST's centres of mass are at pixel 14 of 0 to 27
    middle = [float((drawn.sum(1 - axis) * torch.arange(drawn.shape[axis])).sum()) / mass for axis in (0, 1)]
    top, left = (
        min(max(round(whole / 2 - centre), 0), whole - side)
        for whole, centre, side in zip((height, width), middle, drawn.shape, strict=True)
    )
    out = torch.zeros(height, width)
    out[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return out.round().to(torch.uint8)[None]


def _background(image: Tensor) -> Tensor:
    """Return what the paper would look like without ink: a plane through the image's edge, since light falls off."""
    height, width = image.shape
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    terms = torch.stack([torch.ones_like(image), rows, columns], dim=-1)  # [H, W, 3]
    edge = torch.ones(height, width, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    known, values = terms[edge], image[edge]
    plane = torch.linalg.lstsq(known, values.unsqueeze(1)).solution[:, 0]
    for _ in range(3):  # ink that touches the edge is not paper: what lies far from the plane has no say
        off = (values - known @ plane).abs()
        near = off <= 2 * off.median() + 1
        known, values = known[near], values[near]
        plane = torch.linalg.lstsq(known, values.unsqueeze(1)).solution[:, 0]
    # Noise of the paper, all that is within three times its usual size, is paper.
    noise = 3 * float((values - known @ plane).abs().median())
    return terms @ plane + noise
