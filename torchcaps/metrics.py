"""Metrics: accuracy of label sets, entropy of couplings, dead capsules, confidence intervals."""

import torch
from torch import Tensor

from torchcaps._core.labels import as_multi_hot
from torchcaps._core.stats import wilson_interval
from torchcaps._core.validation import check_no_nan
from torchcaps._core.values import is_readable

__all__ = ["coupling_entropy", "dead_fraction", "exact_set_match", "top_k_set_match", "wilson_interval"]


def top_k_set_match(scores: Tensor, labels: Tensor, k: int | None = None) -> Tensor:
    """Return per image whether its ``k`` highest scores are exactly its labels, in any order.

    The metric of MultiMNIST (Sabour 2017, section 6) with ``k = 2``, and top-1 accuracy with ``k = 1``.

    Args:
        scores: ``[B, J]``.
        labels: class indices ``[B]`` or multi-hot ``[B, J]``.
        k: number of predicted classes; default: the number of labels of each image.

    Shapes:
        ``-> [B]``, bool

    >>> scores, labels = torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.8, 0.1]]), torch.tensor([[1, 0, 1], [1, 0, 1]])
    >>> top_k_set_match(scores, labels)
    tensor([ True, False])
    """
    hot = _label_sets(scores, labels)
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= scores.shape[1]):
        raise ValueError(f"k must be in 1..{scores.shape[1]}, got {k}")
    n_predicted = hot.sum(-1, keepdim=True) if k is None else torch.full_like(hot[:, :1], k, dtype=torch.int64)
    # Rank of each class by score; ties go to the lower class index.
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ((rank < n_predicted) == hot).all(-1)


def exact_set_match(scores: Tensor, labels: Tensor, threshold: float = 0.5) -> Tensor:
    """Return per image whether the classes with a score above ``threshold`` are exactly its labels.

    The metric of DiverseMultiMNIST (Tsai 2020, appendix B.2), where the number of digits is unknown; there, scores
    are sigmoids of logits.

    Shapes:
        scores ``[B, J]``, labels ``[B]`` or multi-hot ``[B, J] -> [B]``, bool

    >>> exact_set_match(torch.tensor([[0.9, 0.1], [0.9, 0.8]]), torch.tensor([0, 0]))
    tensor([ True, False])
    """
    hot = _label_sets(scores, labels)
    return ((scores > threshold) == hot).all(-1)


def coupling_entropy(coupling: Tensor, dim: int = -1) -> Tensor:
    """Return the normalised entropy of couplings: 0 if one competitor takes all, 1 if they are uniform.

    Args:
        coupling: ``[B, *L, I, J]``, not negative.
        dim: the axis of competition: -1, the parents, for most routings; -2, the children, for attention routing.
            Couplings are first normalised to sum to 1 over it; all-zero couplings count as uniform.

    Shapes:
        the coupling's shape without that axis

    >>> coupling_entropy(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor([[1., 0.]])
    """
    check_no_nan(coupling, "coupling")
    if is_readable(coupling) and bool((coupling < 0).any()):
        least = float(coupling.detach().min())
        raise ValueError(f"coupling must not be negative, got {least:g}: entropy needs couplings that sum to 1")
    n = coupling.shape[dim]
    if n < 2:
        raise ValueError(f"coupling must have at least two competitors on axis {dim}, got {n}")
    total = coupling.sum(dim, keepdim=True)
    fraction = torch.where(total > 0, coupling / total.clamp_min(torch.finfo(coupling.dtype).tiny), 1 / n)
    return torch.special.entr(fraction).sum(dim) / torch.log(torch.tensor(float(n), dtype=coupling.dtype))


def dead_fraction(activity: Tensor, threshold: float = 0.05) -> Tensor:
    """Return the fraction of capsules whose activity exceeds ``threshold`` for no image of the batch.

    Args:
        activity: lengths or activations ``[B, ...]``.
        threshold: activity above which a capsule is alive.

    Shapes:
        ``-> []``

    >>> dead_fraction(torch.tensor([[0.9, 0.01], [0.2, 0.02]]))
    tensor(0.5000)
    """
    if activity.dim() < 2 or activity.shape[0] == 0:
        raise ValueError(f"activity must be [B, ...] with at least one image, got {list(activity.shape)}")
    check_no_nan(activity, "activity")
    return (activity.amax(0) <= threshold).to(activity.dtype).mean()


def _label_sets(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as multi-hot bools ``[B, J]``; check scores and shapes."""
    if scores.dim() != 2:
        raise ValueError(f"scores must be [B, classes], got {list(scores.shape)}")
    check_no_nan(scores, "scores")
    hot = as_multi_hot(labels, scores.shape[1]) > 0
    if len(hot) != len(scores):
        raise ValueError(f"labels must have one entry for each of the {len(scores)} images, got {len(hot)}")
    return hot
