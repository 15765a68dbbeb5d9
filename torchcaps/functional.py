"""Length and squash functions of poses, all with finite gradients at zero."""

import torch
from torch import Tensor

__all__ = ["exp_squash", "length", "squash"]


def length(pose: Tensor, normalized: bool = False) -> Tensor:
    """Return the Euclidean norm over the last axis; its gradient at exactly zero is zero, not NaN.

    Args:
        pose: capsule poses.
        normalized: divide by ``sqrt(D)``, so that a pose of ones has length 1 (Choi 2019, section 3.5).

    Shapes:
        ``[..., D] -> [...]``

    >>> length(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """
    norm = torch.linalg.vector_norm(pose, dim=-1)
    return norm / pose.shape[-1] ** 0.5 if normalized else norm


def squash(pose: Tensor) -> Tensor:
    """Squash poses to a length below 1, keeping their direction: Sabour 2017, eq. 1.

    ``v = |s|^2 / (1 + |s|^2) * s / |s|``, computed as ``|s| / (1 + |s|^2) * s``: equal, but without the division that
    is NaN at zero, and therefore without an epsilon that would change the values. For long vectors the factor is
    computed as ``1 / (|s| + 1 / |s|)``, which does not overflow in half precision.

    Shapes:
        ``[..., D] -> [..., D]``

    >>> squash(torch.tensor([3.0, 4.0])).norm()
    tensor(0.9615)
    """
    norm = length(pose).unsqueeze(-1)
    short, long = norm.clamp_max(1), norm.clamp_min(1)
    return torch.where(norm > 1, 1 / (long + 1 / long), short / (1 + short * short)) * pose


def exp_squash(pose: Tensor) -> Tensor:
    """Squash poses to a length below 1 exponentially: Chen 2019 (not numbered). Its Jacobian at zero is the identity.

    ``v' = (1 - exp(-|v|)) * v / |v|``

    Shapes:
        ``[..., D] -> [..., D]``

    >>> exp_squash(torch.tensor([3.0, 4.0])).norm()
    tensor(0.9933)
    """
    norm = length(pose).unsqueeze(-1)
    # At zero the ratio is 0/0 with limit 1, and the inverse of a subnormal norm would overflow: the ratio is 1 up to
    # rounding for all norms up to the least normal number, which replaces them and lets no gradient through.
    safe = norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return -torch.expm1(-safe) / safe * pose
