"""Decoder: reconstructs the image from class capsules, as a regulariser and for visualisation."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchcaps._core.labels import check_class_indices
from torchcaps._core.validation import check_finite
from torchcaps._core.values import is_readable
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.nn.sizes import as_count

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """Reconstruct the image from one class capsule, with all others masked to zero: Sabour 2017, section 4.1.

    The first layer receives all capsules including the masked ones, so the position of the labelled capsule encodes the
    class.

    Args:
        parents, dim: number and pose size of the class capsules.
        image: ``(channels, height, width)`` of the reconstruction.
        hidden: widths of the hidden ReLU layers: (512, 1024) in Sabour 2017, (512, 512) in Choi 2019.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Shapes:
        capsules ``[B, J, D]``; labels ``[B]`` gives ``[B, C, H, W]``. Labels ``[B, K]``, ``K`` classes per
        image, give ``[B, K, C, H, W]``: one reconstruction each (MultiMNIST), with the same weights.

    >>> import torch
    >>> decoder = Decoder(10, 16, (1, 36, 36))
    >>> decoder(torch.randn(2, 10, 16), torch.tensor([[3, 5], [0, 9]])).shape
    torch.Size([2, 2, 1, 36, 36])
    """

    def __init__(
        self,
        parents: int,
        dim: int,
        image: Sequence[int],
        hidden: Sequence[int] = (512, 1024),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parents: int = as_count(parents, "parents")
        self.dim: int = as_count(dim, "dim")
        if not isinstance(image, Sequence) or len(image) != 3:
            raise ValueError(f"image must be (channels, height, width), got {image}")
        if not isinstance(hidden, Sequence):
            raise TypeError(f"hidden must be a sequence of layer widths such as (512, 1024), got {hidden!r}")
        self.image: tuple[int, ...] = tuple(as_count(size, "image") for size in image)
        widths = [parents * dim, *(as_count(width, "hidden") for width in hidden)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after, device=device, dtype=dtype), nn.ReLU()]
        last = nn.Linear(widths[-1], math.prod(self.image), device=device, dtype=dtype)
        self.layers: nn.Sequential = nn.Sequential(*layers, last, nn.Sigmoid())

    def forward(self, capsules: Capsules | Tensor, labels: Tensor | None = None, top: int | None = None) -> Tensor:
        """Reconstruct the images of the labelled classes; without labels, of the most active ones.

        Args:
            capsules: the class capsules.
            labels: class indices of the capsules to keep. In training always the true ones, so that an incorrect
                prediction is not rewarded for a good reconstruction.
            top: if labels is None, number of most active classes to reconstruct, each separately:
                ``[B, top, C, H, W]``. Default: the most active one, ``[B, C, H, W]``.
        """
        classes = as_capsules(capsules)
        shape = classes.pose.shape
        if len(shape) not in (3, 5) or classes.flatten().pose.shape[1:] != (self.parents, self.dim):
            raise ValueError(f"capsules.pose must be [B, {self.parents}, {self.dim}], got {list(shape)}")
        check_finite(classes.pose, "capsules.pose")
        check_finite(classes.activation, "capsules.activation")
        classes = classes.flatten()
        pose = classes.pose
        if labels is None:
            labels = self.predict(classes, top)
        elif top is not None:
            raise ValueError("top is the number of predictions to reconstruct and can't be combined with labels")
        else:
            labels = check_class_indices(labels, self.parents)
            _check_not_multi_hot(labels, self.parents)
            if labels.dim() not in (1, 2) or labels.shape[0] != pose.shape[0]:
                raise ValueError(
                    f"labels must be class indices [B] or [B, K] for {pose.shape[0]} images, got {list(labels.shape)}"
                )
        masked = self.mask(pose.to(next(self.parameters()).dtype), labels)
        return self.layers(masked.flatten(-2)).unflatten(-1, self.image)

    def predict(self, capsules: Capsules | Tensor, top: int | None = None) -> Tensor:
        """Return the most active class ``[B]``, or the ``top`` most active ``[B, top]``.

        Measured by activation if the capsules have one (Hinton 2018), otherwise by length (Sabour 2017).
        """
        classes = as_capsules(capsules).flatten()
        activity = classes.length() if classes.activation is None else classes.activation
        if top is None:
            return activity.argmax(-1)
        if not 1 <= as_count(top, "top") <= self.parents:
            raise ValueError(f"top must be in 1..{self.parents}, got {top}")
        return activity.topk(top, dim=-1).indices

    def mask(self, pose: Tensor, labels: Tensor) -> Tensor:
        """Set all but the labelled capsule of each image to zero: ``[B, J, D] -> [B, (K,) J, D]``."""
        is_labelled = labels.unsqueeze(-1) == torch.arange(self.parents, device=pose.device)  # [B, (K,) J]
        if labels.dim() == 2:
            pose = pose.unsqueeze(1)
        return torch.where(is_labelled.unsqueeze(-1), pose, 0)


def _check_not_multi_hot(labels: Tensor, n_classes: int) -> None:
    """Raise a ValueError if labels are multi-hot rows, which would be read as class indices 0 and 1."""
    if not is_readable(labels) or labels.dim() != 2 or labels.shape[1] != n_classes or n_classes < 3:
        return
    if labels.numel() and bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            "labels must be the indices of the classes to reconstruct, [B] or [B, K], got multi-hot rows of "
            f"{n_classes} classes"
        )
