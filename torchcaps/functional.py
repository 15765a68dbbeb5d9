"""The nonlinearities of capsules: functions of a pose as a whole, all with finite gradients at zero."""

import torch
from torch import Tensor

__all__ = ["exp_squash", "length", "squash"]


def length(pose: Tensor, normalized: bool = False) -> Tensor:
    """Return the Euclidean length over the last axis; its gradient at exactly zero is zero, not NaN.

    Args:
        pose: capsules.
        normalized: divide by ``sqrt(D)``, so that a pose of ones has length 1 (Choi 2019, section 3.4).

    Shapes:
        ``[..., D] -> [...]``
    """
    norm = torch.linalg.vector_norm(pose, dim=-1)
    return norm / pose.shape[-1] ** 0.5 if normalized else norm


def squash(pose: Tensor) -> Tensor:
    """Shrink short vectors to almost zero and long ones to just below one: Sabour 2017, eq. 1.

    ``v = |s|^2 / (1 + |s|^2) * s / |s|``, computed as ``|s| / (1 + |s|^2) * s``: the same, without the
    division that is NaN at zero, and so without an epsilon that would bend the values. For long vectors the
    factor is written ``1 / (|s| + 1 / |s|)``, whose parts do not overflow in half precision.

    Shapes:
        ``[..., D] -> [..., D]``
    """
    norm = length(pose).unsqueeze(-1)
    short, long = norm.clamp_max(1), norm.clamp_min(1)
    return torch.where(norm > 1, 1 / (long + 1 / long), short / (1 + short * short)) * pose


def exp_squash(pose: Tensor) -> Tensor:
    """Shrink exponentially: Chen 2019, eq. 4. Its Jacobian at zero is the identity.

    ``v' = (1 - exp(-|v|)) * v / |v|``

    Shapes:
        ``[..., D] -> [..., D]``
    """
    norm = length(pose).unsqueeze(-1)
    # At zero the ratio is 0/0 and its limit 1; the inner where keeps the NaN out of the gradient as well.
    safe = torch.where(norm > 0, norm, 1)
    return torch.where(norm > 0, -torch.expm1(-safe) / safe, 1) * pose
