"""Networks built from specs: capsule networks and convolutional baselines."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps._core.validation import check_finite, check_float, check_no_nan
from torchcaps._core.values import deferred_checks, is_batched
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.losses import Reduction
from torchcaps.models.builder import Layers
from torchcaps.models.heads import HeadName, Output, build_head
from torchcaps.models.recipe import Objective, Recipe
from torchcaps.nn import CapsuleStack, Decoder

if TYPE_CHECKING:
    from torchcaps.models.spec import ModelSpec

__all__ = ["CapsuleNetwork", "ConvNetwork", "Network"]


class Network(nn.Module, ABC):
    """Base class of all models: images in, `Output` out, with a training recipe.

    The table of its layers is `torchcaps.profiling.summarize(model)`.

    Args:
        spec: spec that the model is built from.
        layers: its layers, in order.
        n_objects: number of objects per image; ``None``: any number.

    Attributes:
        channels_last: whether images are converted to channels-last memory format (not on CUDA), which makes
            convolutions on a CPU up to a third faster.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> isinstance(model, Network), model.predict(model(torch.rand(2, 1, 28, 28))).shape
    (True, torch.Size([2]))
    """

    channels_last = True

    def __init__(self, spec: "ModelSpec", layers: Layers, n_objects: int | None = 1) -> None:
        super().__init__()
        if n_objects is not None and n_objects > spec.classes:
            raise ValueError(f"n_objects must be at most the number of classes, {spec.classes}, got {n_objects}")
        self.set_origin(spec, type(spec).__name__, spec.default_recipe(), n_objects)
        self.front: nn.Sequential = nn.Sequential()
        for name, module in layers.front.items():
            self.front.add_module(name, module)

    def set_origin(self, spec: "ModelSpec", name: str, recipe: Recipe, n_objects: int | None) -> None:
        """Set the read-only properties of the model. Called on construction only."""
        self._spec, self._name, self._recipe, self._n_objects = spec, name, recipe, n_objects

    @property
    def spec(self) -> "ModelSpec":
        """Spec that the model was built from."""
        return self._spec

    @property
    def name(self) -> str:
        """Name in `torchcaps.list_models`, or the class name of the spec."""
        return self._name

    @property
    def recipe(self) -> Recipe:
        """Training settings: those of the paper, or those given to `torchcaps.create_model`."""
        return self._recipe

    @property
    def n_objects(self) -> int | None:
        """Number of objects per image; ``None``: any number."""
        return self._n_objects

    @property
    def n_parameters(self) -> int:
        """Number of parameters, including frozen ones."""
        return sum(parameter.numel() for parameter in self.parameters())

    def extra_repr(self) -> str:
        """Return name and parameter count for ``print(model)``."""
        return f"name={self.name!r}, n_parameters={self.n_parameters:,}"

    @abstractmethod
    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Compute the output for a batch of images."""

    def loss(self, reduction: Reduction = "mean") -> Objective:
        """Build the loss of the recipe: ``loss(output, labels, targets)``.

        Args:
            reduction: over the images of a batch: ``"mean"``, ``"sum"`` or ``"none"``.
        """
        return self.recipe.loss.make(self.n_objects, reduction)

    def probabilities(self, output: Output | Tensor) -> Tensor:
        """Return scores on a scale from 0 to 1: logits as softmax or sigmoid, lengths and activations unchanged.

        Shapes:
            ``[B, classes] -> [B, classes]``
        """
        scores = self._as_scores(output)
        if self.recipe.loss.name == "cross_entropy":
            return scores.softmax(-1)
        return scores.sigmoid() if self.recipe.loss.name == "binary" else scores

    def predict(self, output: Output | Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the predicted classes, in the format of the labels.

        One object per image: the class with the highest score. ``K`` objects (MultiMNIST): the ``K`` classes with the
        highest scores, highest first. Any number of objects (DiverseMultiMNIST): all classes with a probability above
        0.5. Of equal scores the lower class index wins.

        Args:
            output: output of the model, or its scores ``[B, classes]``.
            labels: class indices ``[B, K]``; if given, each correct prediction has the position of its label.

        Shapes:
            class indices ``[B]`` or ``[B, K]``; multi-hot ``[B, classes]`` (bool) for any number of objects

        >>> import torch, torchcaps
        >>> model = torchcaps.create_model("sabour2017_multimnist", reconstruction=False)
        >>> model.predict(torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
        tensor([[1, 3]])
        """
        scores = self._as_scores(output)
        check_no_nan(scores, "scores")
        if self.n_objects is None:
            return self.probabilities(scores) > 0.5
        return self._top_classes(scores, labels)

    def predict_multi_hot(self, output: Output | Tensor) -> Tensor:
        """Return the predicted classes as multi-hot rows ``[B, classes]`` (bool), for any number of objects."""
        scores, predicted = self._as_scores(output), self.predict(output)
        if self.n_objects is None:
            return predicted
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, predicted.view(len(scores), -1), value=True)

    def is_correct(self, output: Output | Tensor, labels: Tensor) -> Tensor:
        """Return for each image whether its predicted classes are exactly its labels, in any order.

        This is the accuracy the papers report: top-1 for one object, the set of both digits for MultiMNIST (Sabour
        2017, section 6), the exact set for DiverseMultiMNIST (Tsai 2020, appendix B.2).

        Args:
            output: output of the model, or its scores ``[B, classes]``.
            labels: class indices ``[B]`` or ``[B, K]``, or multi-hot ``[B, classes]``.

        Shapes:
            ``[B]`` (bool)
        """
        predicted = self.predict_multi_hot(output)
        if self.n_objects is None:
            present = as_multi_hot(labels, self.spec.classes)
        else:
            present = split_labels(labels, self.spec.classes, self.n_objects)[1]
        if len(present) != len(predicted):
            raise ValueError(f"labels must have one row for each of the {len(predicted)} images, got {len(present)}")
        return (predicted == (present > 0)).all(-1)

    def top_class(self, output: Output | Tensor) -> Tensor:
        """Return the index of the class with the highest score, for any number of objects: ``[B]``."""
        return self._as_scores(output).argmax(-1)

    def _as_scores(self, output: Output | Tensor) -> Tensor:
        """Return the scores of an output; raise if they are not ``[B, classes]``."""
        scores = output.scores if isinstance(output, Output) else output
        if scores.dim() != 2 or scores.shape[1] != self.spec.classes:
            raise ValueError(f"scores must be [B, {self.spec.classes}], got {list(scores.shape)}")
        return scores

    def _top_classes(self, scores: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the classes with the highest scores: ``[B]``, or ``[B, K]`` in the order of the labels, if given."""
        n_objects = self.n_objects or 1
        if n_objects == 1:
            return scores.argmax(-1)
        predicted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :n_objects]
        return predicted if labels is None else _align_to_labels(predicted, labels)

    def _prepare(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Validate the inputs; return images in the dtype of the model, and the class indices to decode."""
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            raise TypeError("images must be floating-point numbers in 0..1, got torch.uint8: pass images.float() / 255")
        check_float(images, "images")
        channels, height, width = self.spec.image
        if images.dim() != 4 or tuple(images.shape[1:]) != self.spec.image:
            raise ValueError(
                f"images must be [B, {channels}, {height}, {width}], got {list(images.shape)}; for another size "
                "build the model with create_model(..., image=(channels, height, width))"
            )
        check_finite(images, "images")
        if labels is not None:
            if not isinstance(labels, Tensor):
                raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
            if labels.dim() == 0 or labels.shape[0] != images.shape[0]:
                raise ValueError(
                    f"labels must have one row for each of the {images.shape[0]} images, got {list(labels.shape)}"
                )
            if self.n_objects is None:
                as_multi_hot(labels, self.spec.classes)  # validation only: nothing is decoded
                labels = None
            else:
                labels = split_labels(labels, self.spec.classes, self.n_objects)[0]
        images = images.to(next(self.parameters()).dtype)
        is_plain = not torch.compiler.is_compiling() and not is_batched(images)
        if self.channels_last and images.device.type != "cuda" and is_plain:
            # clone and not to(): with a single channel to() would keep the strides
            images = images.clone(memory_format=torch.channels_last)
        return images, labels


class CapsuleNetwork(Network):
    """Convolutional front, primary capsules, capsule layers, and a head that scores the class capsules.

    Args:
        spec: spec that the model is built from.
        layers: its layers; the last one yields the class capsules.
        head: name of the head that scores the class capsules.
        schedule: order of the routing iterations, see `torchcaps.nn.CapsuleStack`.
        decoder: widths of the hidden layers of the decoder; ``None``: no decoder.
        n_objects: number of objects per image, each decoded separately; ``None``: any number, without decoder.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> output = model(torch.rand(2, 1, 28, 28))
    >>> isinstance(model, CapsuleNetwork), output.capsules.pose.shape, output.reconstruction.shape
    (True, torch.Size([2, 10, 16]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(
        self,
        spec: "ModelSpec",
        layers: Layers,
        head: HeadName,
        *,
        schedule: Any = "sequential",
        decoder: tuple[int, ...] | None = None,
        n_objects: int | None = 1,
    ) -> None:
        super().__init__(spec, layers, n_objects)
        self.capsules: CapsuleStack = CapsuleStack(layers.capsules, schedule)
        self.head: nn.Module = build_head(head, layers.dim)
        self.decoder: Decoder | None = (
            None if decoder is None else Decoder(spec.classes, layers.dim, spec.image, decoder)
        )

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Compute class capsules, scores and, if the model has a decoder, reconstructions.

        In training mode the capsules of the labels are decoded; in evaluation mode or without labels those of the
        predicted classes (`decode` decodes any class). For several objects per image, correct predictions are in the
        order of the labels, so that each reconstruction is compared with its own target.

        Args:
            images: ``[B, C, H, W]``.
            labels: class indices ``[B]`` or ``[B, objects]``, or multi-hot ``[B, classes]``.
            trace: return the coupling coefficients of every layer at every iteration.
        """
        with deferred_checks():
            return self._forward(*self._prepare(images, labels), trace)

    def _forward(self, images: Tensor, classes: Tensor | None, trace: bool) -> Output:
        """Compute the output for checked images, and class indices to decode."""
        primary = self.front(images)
        traces = None
        if trace:
            capsules, traces = self.capsules(primary, trace=True)
        else:
            capsules = self.capsules(primary)
        class_capsules = capsules.flatten()
        scores = self.head(class_capsules)
        reconstruction = None
        if self.decoder is not None:
            if classes is None or not self.training:
                classes = self._top_classes(scores, classes)
            reconstruction = self.decoder(class_capsules, classes)
        return Output(scores, class_capsules, reconstruction, traces)

    def decode(self, capsules: Capsules | Tensor | Output, labels: Tensor | None = None) -> Tensor:
        """Decode the capsules of the given classes, or of the predicted classes, in any mode.

        Shapes:
            capsules ``[B, classes, D]``, labels ``[B]`` or ``[B, K] -> [B, C, H, W]`` or ``[B, K, C, H, W]``
        """
        if self.decoder is None:
            raise ValueError(f"{self.name} has no decoder: build it with create_model(..., reconstruction=True)")
        if isinstance(capsules, Output):
            assert capsules.capsules is not None
            capsules = capsules.capsules
        class_capsules = as_capsules(capsules)
        return self.decoder(class_capsules, self._top_classes(self.head(class_capsules)) if labels is None else labels)


class ConvNetwork(Network):
    """Convolutional network from images to logits: the papers' baselines.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("chen2019_lenet")
    >>> isinstance(model, ConvNetwork), model(torch.rand(2, 1, 28, 28)).scores.shape
    (True, torch.Size([2, 10]))
    """

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Compute logits. Labels are validated only; the trace is empty."""
        with deferred_checks():
            images, _ = self._prepare(images, labels)
            return Output(self.front(images), trace=() if trace else None)


def _align_to_labels(predicted: Tensor, labels: Tensor) -> Tensor:
    """Move each correct prediction to the position of its label; incorrect ones fill the rest in order: ``[B, K]``."""
    equal = predicted.unsqueeze(1) == labels.unsqueeze(2)  # [B, label, prediction]
    n = labels.shape[1]
    positions = torch.arange(n, device=labels.device)
    label_matched, prediction_matched = equal.any(2), equal.any(1)
    free_labels = torch.where(label_matched, n, positions).argsort(dim=1, stable=True)  # unmatched labels first
    free_predictions = torch.where(prediction_matched, n, positions).argsort(dim=1, stable=True)
    order = torch.empty_like(labels).scatter(1, free_labels, free_predictions)
    order = torch.where(label_matched, equal.to(torch.uint8).argmax(2), order)
    return predicted.gather(1, order)
