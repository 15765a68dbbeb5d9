"""Whether a model has recognised an image, as its paper counts."""

from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps.metrics import exact_set_match, top_k_set_match
from torchcaps.models.network import Network

__all__ = ["is_right"]


def is_right(model: Network, scores: Tensor, labels: Tensor) -> Tensor:
    """Return for each image whether it was recognised, as its paper counts: ``[B]``, truth values.

    One object: the largest score. Two: the two largest, in any order. Any number: those over a half are exactly those
    that are there.
    """
    if model.n_objects is None:
        return exact_set_match(scores.sigmoid() if model.recipe.loss.name == "binary" else scores, labels)
    return top_k_set_match(scores, split_labels(labels, scores.shape[1], model.n_objects)[1], model.n_objects)
