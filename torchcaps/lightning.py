"""Models under Lightning's ``Trainer``, and the metrics of the papers as torchmetrics. Needs the extra ``lightning``.

`CapsuleModule` trains a model with the loss, optimiser, schedule and metrics of its recipe. `torchcaps.fit` and
``torchcaps train`` have exact resume and run directories; use this module if a project is built on Lightning.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.registry import is_import_path
from torchcaps.metrics import coupling_entropy, exact_set_match, top_k_set_match
from torchcaps.models import Network, Output, create_model
from torchcaps.training.ascent import CoefficientAscent

try:
    import lightning
    import torchmetrics
except ImportError as error:
    raise ImportError(
        "torchcaps.lightning needs lightning and torchmetrics: pip install 'torchcaps[lightning]'"
    ) from error

__all__ = ["Accuracy", "CapsuleModule", "CouplingEntropy", "DeadFraction", "ExactSetMatch", "TopKSetMatch"]

PLAIN = (str, int, float, tuple, type(None))  # types of hyperparameters that are stored in checkpoints


class CapsuleModule(lightning.LightningModule):
    """A model of torchcaps as a ``LightningModule``, trained by its recipe.

    Batches are pairs of images ``[B, C, H, W]``, floats or uint8 (scaled to 0..1), and labels, or triples with the
    targets of the decoder, as the data sets of torchcaps yield them for several objects per image. Logged are
    ``train_loss``, ``train_accuracy`` and the same for ``val`` and ``test``. The schedule is applied per optimiser
    step; the ascent of `torchcaps.routing.Quadratic` follows each step. ``CapsuleModule.load_from_checkpoint(path)``
    restores a model given by name; a network, and changes that are objects such as ``routing=EM(2)``, are passed again:
    ``load_from_checkpoint(path, model=network)``. Checkpoints contain tensors and plain values only.

    Args:
        model: name of a model, or a network.
        changes: fields of the model's spec, if it is given by name.

    >>> module = CapsuleModule("capsnet_small", classes=3)
    >>> module(torch.rand(4, 1, 28, 28)).scores.shape
    torch.Size([4, 3])
    >>> # lightning.Trainer(max_epochs=5).fit(module, train_loader, val_loader)
    """

    def __init__(self, model: str | Network, **changes: Any) -> None:
        super().__init__()
        given = {"model": model, **changes}
        self.save_hyperparameters(ignore=[k for k, v in given.items() if not isinstance(v, PLAIN)], logger=False)
        if isinstance(model, Network):
            if changes:
                raise ValueError(f"fields of a model can be changed by name only, got a network and {sorted(changes)}")
            self.network = model
        elif is_import_path(model):
            raise ValueError(
                f"{model!r} is an import path, which a checkpoint could name too: pass create_model({model!r})"
            )
        else:
            self.network = create_model(model, **changes)
        self.recipe = self.network.recipe
        self.loss = self.network.loss()
        self.ascent = CoefficientAscent(self.network, self.recipe)
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (Accuracy(self.network) for _ in range(3))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        """Compute the output of the network."""
        return self.network(_as_floats(images), labels)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch; log loss and accuracy."""
        return self._step(batch, "train", self.train_accuracy)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Log loss and accuracy of a batch."""
        return self._step(batch, "val", self.val_accuracy)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Log loss and accuracy of a batch."""
        return self._step(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Sequence[Tensor] | Tensor, batch_idx: int) -> Tensor:
        """Return the predicted classes of a batch, with or without labels: see `Network.predict`."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.network.predict(self(images))

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Take the ascent steps of `torchcaps.routing.Quadratic` that are due after an optimiser step."""
        step = self.global_step - 1
        if step >= 0 and self.ascent.is_due(step):
            self.ascent.run(None, _as_floats(batch[0]), batch[1], step, self._lr_factor(step))

    def configure_optimizers(self) -> Any:
        """Return optimiser and schedule of the recipe."""
        optimizer = self.recipe.optimizer.make(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate of a step."""
        total = self.trainer.estimated_stepping_batches
        n_batches = self.trainer.num_training_batches
        per_epoch = math.ceil(n_batches / self.trainer.accumulate_grad_batches) if math.isfinite(n_batches) else None
        epoch = step // per_epoch if per_epoch else 0
        # After the last step the scheduler asks for one more factor.
        step = min(step, int(total) - 1) if math.isfinite(total) else step
        return self.recipe.lr_schedule.factor(step, epoch, int(total) if math.isfinite(total) else None)

    def _step(self, batch: Sequence[Tensor], split: str, accuracy: "Accuracy") -> Tensor:
        """Return the loss of a batch; log loss and accuracy of a split."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            raise TypeError(f"batch must be (images, labels) or (images, labels, targets), got {type(batch).__name__}")
        images, labels = _as_floats(batch[0]), batch[1]
        targets = _as_floats(batch[2]) if len(batch) == 3 else images
        output = self.network(images, labels)
        loss = self.loss(output, labels, targets, self.global_step)
        accuracy.update(output.scores.detach(), labels)
        self.log(f"{split}_loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        self.log(f"{split}_accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(images), prog_bar=True)
        return loss


def _as_floats(images: Tensor) -> Tensor:
    """Return images as floats; bytes are scaled to 0..1."""
    return images / 255 if images.dtype == torch.uint8 else images


# Metrics ------------------------------------------------------------------------------------------------------------


class _Mean(torchmetrics.Metric):
    """Base class: mean of one value per image, summed over batches and processes."""

    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add values of any shape."""
        self.total += values.detach().double().sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        """Return the mean."""
        return (self.total / self.count.clamp_min(1)).float()


class Accuracy(_Mean):
    """Fraction of images classified correctly, in the sense of `Network.is_correct`.

    Args:
        network: network whose scores are counted; not a submodule of the metric.
        kwargs: options of ``torchmetrics.Metric``.

    >>> import torchcaps
    >>> metric = Accuracy(torchcaps.create_model("capsnet_small", classes=2))
    >>> metric(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        object.__setattr__(self, "_network", [network])  # in a list: not registered as a submodule

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch of scores ``[B, classes]`` and labels."""
        self.add(self._network[0].is_correct(scores, labels))  # type: ignore[index,operator]


class TopKSetMatch(_Mean):
    """Fraction of images whose ``k`` highest scores are exactly their labels: `torchcaps.metrics.top_k_set_match`.

    Args:
        k: number of predicted classes; default: the number of labels of each image.
        kwargs: options of ``torchmetrics.Metric``.

    >>> metric = TopKSetMatch(k=1)
    >>> metric(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """

    def __init__(self, k: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch of scores ``[B, J]`` and labels ``[B]`` or multi-hot ``[B, J]``."""
        self.add(top_k_set_match(scores, labels, self.k))


class ExactSetMatch(_Mean):
    """Fraction of images whose classes above a threshold are exactly their labels: `torchcaps.metrics.exact_set_match`.

    Args:
        threshold: score above which a class is predicted.
        kwargs: options of ``torchmetrics.Metric``.

    >>> metric = ExactSetMatch()
    >>> metric(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """

    def __init__(self, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch of scores ``[B, J]`` and labels ``[B]`` or multi-hot ``[B, J]``."""
        self.add(exact_set_match(scores, labels, self.threshold))


class CouplingEntropy(_Mean):
    """Mean normalised entropy of couplings: `torchcaps.metrics.coupling_entropy`.

    Args:
        dim: axis of competition: -1, the parents; -2, the children (attention routing).
        kwargs: options of ``torchmetrics.Metric``.

    >>> metric = CouplingEntropy()
    >>> metric(torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    tensor(0.5000)
    """

    higher_is_better = None

    def __init__(self, dim: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim = dim

    def update(self, coupling: Tensor) -> None:
        """Add the couplings ``[B, *L, I, J]`` of a batch."""
        self.add(coupling_entropy(coupling, self.dim))


class DeadFraction(torchmetrics.Metric):
    """Fraction of capsules whose activity exceeds a threshold for no image: `torchcaps.metrics.dead_fraction`.

    Unlike the mean over batches, this counts a capsule as dead only if no image of any batch activates it.

    Args:
        threshold: activity above which a capsule is alive.
        kwargs: options of ``torchmetrics.Metric``.

    >>> metric = DeadFraction()
    >>> metric(torch.tensor([[0.9, 0.01], [0.2, 0.02]]))
    tensor(0.5000)
    """

    higher_is_better = False
    largest: Tensor

    def __init__(self, threshold: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, activity: Tensor) -> None:
        """Add the lengths or activations ``[B, ...]`` of a batch."""
        if activity.dim() < 2 or not len(activity):
            raise ValueError(f"activity must be [B, ...] with at least one image, got {list(activity.shape)}")
        self.largest = torch.maximum(self.largest, activity.detach().amax(0))

    def compute(self) -> Tensor:
        """Return the fraction over all batches so far."""
        return (self.largest <= self.threshold).float().mean()
