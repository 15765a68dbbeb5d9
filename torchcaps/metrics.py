"""What is measured: of predictions as sets of classes, and of capsules at work."""

import torch
from torch import Tensor

from torchcaps._core.labels import as_multi_hot
from torchcaps._core.stats import wilson_interval
from torchcaps._core.validation import check_no_nan

__all__ = ["coupling_entropy", "dead_capsules", "exact_set_match", "top_k_set_match", "wilson_interval"]


def top_k_set_match(scores: Tensor, labels: Tensor, k: int | None = None) -> Tensor:
    """Return for each image whether its ``k`` highest scores are exactly its labels, in any order.

    The measure of MultiMNIST (Sabour 2017, section 6) with ``k = 2``, and plain accuracy with ``k = 1``.

    Args:
        scores: ``[B, J]``.
        labels: ``[B]`` class numbers or multi-hot ``[B, J]``.
        k: how many classes are predicted; by default 1 for class numbers, and for multi-hot labels as many as
            each image has.

    Shapes:
        ``-> [B]``, truth values
    """
    hot = _label_sets(scores, labels)
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= scores.shape[1]):
        raise ValueError(f"k must lie in 1..{scores.shape[1]}, got {k}")
    n_predicted = hot.sum(-1, keepdim=True) if k is None else torch.full_like(hot[:, :1], k, dtype=torch.int64)
    # The place of each class in the order of the scores; equal scores go to the lower class number.
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ((rank < n_predicted) == hot).all(-1)


def exact_set_match(scores: Tensor, labels: Tensor, threshold: float = 0.5) -> Tensor:
    """Return for each image whether the classes that score over ``threshold`` are exactly its labels.

    The measure of DiverseMultiMNIST (Tsai 2020), where the number of digits is not known; scores there are
    sigmoids of logits.

    Shapes:
        scores ``[B, J]``, labels ``[B]`` or multi-hot ``[B, J] -> [B]``, truth values
    """
    hot = _label_sets(scores, labels)
    return ((scores > threshold) == hot).all(-1)


def coupling_entropy(coupling: Tensor, dim: int = -1) -> Tensor:
    """Return how evenly couplings are spread: their entropy over that of equal ones, 0 (one gets all) to 1.

    Args:
        coupling: ``[B, *L, I, J]``, not negative.
        dim: the axis that competes: -1, the parents, for most; -2, the children, for attention routing. Couplings
            are scaled to sum to 1 over it first; those that are all zero count as even.

    Shapes:
        the coupling's, less that axis
    """
    check_no_nan(coupling, "coupling")
    if bool((coupling < 0).any()):
        raise ValueError("coupling must not be negative: the entropy of free couplings is not defined")
    n = coupling.shape[dim]
    if n < 2:
        raise ValueError(f"coupling must have two competitors or more on axis {dim}, got {n}")
    total = coupling.sum(dim, keepdim=True)
    share = torch.where(total > 0, coupling / total.clamp_min(torch.finfo(coupling.dtype).tiny), 1 / n)
    return torch.special.entr(share).sum(dim) / torch.log(torch.tensor(float(n), dtype=coupling.dtype))


def dead_capsules(activity: Tensor, threshold: float = 0.05) -> Tensor:
    """Return the share of capsules that no image of the batch brings over ``threshold``.

    Args:
        activity: lengths or activations ``[B, ...]``.
        threshold: what counts as awake.

    Shapes:
        ``-> []``
    """
    if activity.dim() < 2 or activity.shape[0] == 0:
        raise ValueError(f"activity must be [B, ...] of one image or more, got {list(activity.shape)}")
    check_no_nan(activity, "activity")
    return (activity.amax(0) <= threshold).to(activity.dtype).mean()


def _label_sets(scores: Tensor, labels: Tensor) -> Tensor:
    """Return which classes each image has, ``[B, J]`` truth values."""
    if scores.dim() != 2:
        raise ValueError(f"scores must be [B, classes], got {list(scores.shape)}")
    check_no_nan(scores, "scores")
    hot = as_multi_hot(labels, scores.shape[1]) > 0
    if len(hot) != len(scores):
        raise ValueError(f"labels must be one for each of the {len(scores)} images, got {len(hot)}")
    return hot
