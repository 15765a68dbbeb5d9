"""Half-length companions: the same training in half the time, to check whether a result has converged.

A claim is judged only if runs of half the length agree (`torchcaps.reproduce.verdicts`). A run that is merely cut in
the middle has not finished its schedule, so every schedule of the companion is compressed to its own length.
"""

import dataclasses
from typing import Any

from torchcaps.data.registry import find_spec
from torchcaps.models.recipe import LossConfig
from torchcaps.training import RunSpec

__all__ = ["half_length_spec"]


def half_length_spec(spec: RunSpec) -> RunSpec:
    """Return the specification of a run of half the length with a complete schedule of its own.

    - ``steps`` and ``max_minutes`` are halved, rounded down to at least 1 step.
    - ``epochs`` are halved; an odd number becomes half the number of steps.
    - The learning-rate schedule runs through the same factors in half the time (`LRSchedule.rescale`); `OneCycle`
      follows the length of the run anyway.
    - The linear margin schedule of the spread loss is compressed by the same factor.
    - A run that stops at a target accuracy has no length of its own: the target is the one with twice the error.

    >>> half_length_spec(RunSpec.of("capsnet_small", epochs=4)).recipe.epochs
    2
    """
    recipe = spec.recipe
    changes: dict[str, Any] = {"lr_schedule": recipe.lr_schedule.rescale(0.5), "loss": _compress(recipe.loss)}
    if recipe.steps is not None:
        changes["steps"] = max(1, recipe.steps // 2)
    elif recipe.epochs is not None or spec.max_minutes is None:
        epochs = recipe.epochs or 1  # the default of a run without any limit
        if epochs % 2:
            changes["steps"] = max(1, epochs * _batches_per_epoch(spec) // 2)
        else:
            changes["epochs"] = epochs // 2
    minutes = None if spec.max_minutes is None else spec.max_minutes / 2
    target = spec.target_accuracy
    if target is not None:
        target = max(0.01, round(1 - 2 * (1 - target), 6))
    return dataclasses.replace(spec, max_minutes=minutes, target_accuracy=target).replace_recipe(**changes)


def _compress(loss: LossConfig) -> LossConfig:
    """Return a loss whose linear margin schedule takes half the steps; other losses have no schedule."""
    if loss.name != "spread" or loss.margin_schedule != "linear":
        return loss
    return dataclasses.replace(loss, margin_steps=max(1, loss.margin_steps // 2))


def _batches_per_epoch(spec: RunSpec) -> int:
    """Return the number of training steps per epoch from the published size of the data set, which is not opened."""
    options = spec.data_options
    dataset = dataclasses.replace(find_spec(spec.recipe.data), **options)
    n_images = dataset.n_images("train")
    if n_images is None and dataset.made_from:  # generated: one or more images per digit
        n_digits = find_spec(dataset.made_from).n_images("train") or 0
        limit = spec.max_train_images
        n_images = limit if limit is not None and limit <= n_digits else None
    if n_images is None:
        raise ValueError(
            f"{spec.model} on {spec.recipe.data}: half of {spec.recipe.epochs} epochs needs the size of the training "
            "set, which is not published: set an even number of epochs, steps, or max_train_images"
        )
    n_images = min(n_images, spec.max_train_images or n_images)
    n_images -= round(spec.recipe.val_fraction * n_images)
    return -(-n_images // spec.recipe.batch_size)
