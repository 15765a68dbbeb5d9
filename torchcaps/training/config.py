"""What one chooses when choosing a run: the model, how it is trained, on what, and how long."""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torchcaps._core.serialize import from_plain, to_plain
from torchcaps._core.validation import check_field_names, check_fields, check_range
from torchcaps.models.recipe import Recipe
from torchcaps.training.names import find_model

__all__ = ["Precision", "RunSpec"]

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]


@dataclass(frozen=True)
class RunSpec:
    """A run: everything that decides what comes out of it.

    Args:
        model: the name of a model, or the import path of your own.
        model_options: its fields that are not as the name has them.
        recipe: how it is trained (default: the model's own recipe). `RunSpec.of` replaces single fields of it.
        data_options, test_options: options of the training set and of the test set.
        data_dir: the data folder.
        max_minutes: at most so long, over all sessions of the run; a schedule over the whole training is then laid out
            by the speed of the first steps.
        max_grad_norm: the largest norm of a gradient; longer ones are shortened to it.
        micro_batches: every batch is taken in so many pieces, one after the other, to save memory. Gradients are those
            of the whole batch.
        precision: of the numbers, in Lightning's words: ``"bf16-mixed"`` computes in bfloat16 and keeps weights whole.
        early_stopping_patience: stop after so many looks at the images held out without a better result.
        target_accuracy: stop when so large a share of the images held out is right, as Sabour 2017, section 5.2, does.
        ema_decay: of the average of the weights, each step.
        seed: of the weights, the order of images, augmentation and dropout.
        deterministic: refuse operations that may differ from one time to the next on the same machine.
        num_threads: of the CPU; ``None``: as many as there are cores for each process.
        num_workers: processes that make batches ahead.
        device: ``"cpu"``, ``"cuda"``, ``"mps"``, or ``"auto"``: what there is.
        devices: how many processes share every batch, on this machine.
        eval_interval_epochs: epochs between two looks at the images held out (without any: at the test images).
        eval_interval_steps: steps between two looks; by default 10,000 where an epoch has more, as those of images that
            are made when asked for may.
        max_train_images: how many images are learnt from at most, always the same ones, spread over the whole set.
        max_test_images: how many images are tested with at most, always the same ones; by default all of them, and
            10,000 of more than 500,000.
        checkpoint_interval_minutes: between two checkpoints inside an epoch; there is one at the end of each.
        checkpoint_interval_steps: the same in steps.
        tensorboard: write the curves for TensorBoard too.

    >>> RunSpec.of("capsnet_small", epochs=2).recipe.epochs
    2
    """

    model: str = "capsnet_small"
    model_options: dict[str, Any] = field(default_factory=dict, hash=False)
    recipe: Recipe = cast("Recipe", None)  # replaced by the model's recipe in __post_init__
    data_options: dict[str, Any] = field(default_factory=dict, hash=False)
    test_options: dict[str, Any] = field(default_factory=dict, hash=False)
    data_dir: str | None = None
    max_minutes: float | None = None
    max_grad_norm: float | None = None
    micro_batches: int = 1
    precision: Precision = "32-true"
    early_stopping_patience: int | None = None
    target_accuracy: float | None = None
    ema_decay: float = 0.999
    seed: int = 0
    deterministic: bool = False
    num_threads: int | None = None
    num_workers: int = 0
    device: Literal["cpu", "cuda", "mps", "auto"] = "auto"
    devices: int = 1
    eval_interval_epochs: int = 1
    eval_interval_steps: int | None = None
    max_train_images: int | None = None
    max_test_images: int | None = None
    checkpoint_interval_minutes: float = 5.0
    checkpoint_interval_steps: int | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        entry = find_model(self.model)
        check_field_names(type(entry.spec), self.model_options, self.model)
        if self.recipe is None:
            object.__setattr__(self, "recipe", entry.recipe(dataclasses.replace(entry.spec, **self.model_options)))
        check_fields(self)
        for name in (
            "micro_batches",
            "devices",
            "eval_interval_epochs",
            "early_stopping_patience",
            "num_threads",
            "checkpoint_interval_steps",
        ):
            check_range(self, name, 1)
        for name in ("eval_interval_steps", "max_train_images", "max_test_images"):
            check_range(self, name, 1)
        for name in ("max_minutes", "max_grad_norm", "checkpoint_interval_minutes"):
            check_range(self, name, 0, strict=True)
        check_range(self, "num_workers", 0)
        check_range(self, "target_accuracy", 0, 1, strict=True)
        check_range(self, "seed", -(2**63), 2**63 - 1)
        check_range(self, "ema_decay", 0, 1)

    @classmethod
    def of(cls, model: str = "capsnet_small", **changes: Any) -> "RunSpec":
        """Return a run of a model with changes: fields of the model, of its recipe, or of the run itself.

        A name that both have is the run's; the model's own is ``model_options={"name": ...}``.
        """
        spec = find_model(model).spec
        own = {f.name for f in dataclasses.fields(cls)}
        of_recipe = {f.name for f in dataclasses.fields(Recipe)}
        of_model = {f.name for f in dataclasses.fields(spec)} - own - of_recipe
        for name in changes:
            if name not in own | of_recipe | of_model:
                raise ValueError(f"neither a run nor {model} has a field {name!r}: see RunSpec, Recipe and the model's")
        fields = {**changes.get("model_options", {}), **{k: v for k, v in changes.items() if k in of_model}}
        run = cls(
            model, **{k: v for k, v in changes.items() if k in own and k != "model_options"}, model_options=fields
        )
        return run.replace_recipe(**{k: v for k, v in changes.items() if k in of_recipe})

    def replace_recipe(self, **changes: Any) -> "RunSpec":
        """Return the run with other values in its recipe; of epochs and steps the one that is given counts."""
        if "epochs" in changes and "steps" not in changes:
            changes["steps"] = None
        if "steps" in changes and "epochs" not in changes:
            changes["epochs"] = None
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, **changes)) if changes else self

    def to_plain(self) -> dict[str, Any]:
        """Return the run as plain values, all of them, the recipe's among the rest."""
        values = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "recipe"}
        return {**values, **to_plain(self.recipe)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "RunSpec":
        """Return the run that plain values stand for."""
        of_recipe = {f.name for f in dataclasses.fields(Recipe)}
        own = {k: v for k, v in values.items() if k not in of_recipe}
        check_field_names(cls, own, "a run")
        spec = find_model(own.get("model", cls.model)).spec
        kinds = typing.get_type_hints(type(spec))
        check_field_names(type(spec), own.get("model_options", {}), own.get("model"))
        own["model_options"] = {
            name: from_plain(kinds[name], value) for name, value in own.get("model_options", {}).items()
        }
        recipe = from_plain(Recipe, {k: v for k, v in values.items() if k in of_recipe})
        return cls(**own, recipe=recipe)
