"""The two kinds of network that every model is: capsules over a convolutional front, or a plain convolutional one."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps._core.validation import check_finite, check_float, check_no_nan
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.models.builder import Layers
from torchcaps.models.heads import HeadName, make_head
from torchcaps.models.output import Output
from torchcaps.models.recipe import Recipe
from torchcaps.nn import CapsuleStack, Decoder
from torchcaps.profiling.summary import Summary, summarize

if TYPE_CHECKING:
    from torchcaps.models.spec import ModelSpec

__all__ = ["CapsuleNetwork", "ConvNetwork", "Network"]


class Network(nn.Module, ABC):
    """What all models share: images in, one `Output` out, and a recipe to train by.

    Attributes:
        spec: the choice that the model was built from.
        recipe: what it is trained with by default.
        name: its name in `torchcaps.list_models`, or that of its spec.
        channels_last: let the convolutions work on images that are so in memory: on a CPU up to a third faster.
    """

    channels_last = True

    def __init__(self, spec: "ModelSpec", layers: Layers, n_objects: int | None = 1) -> None:
        super().__init__()
        if n_objects is not None and n_objects > spec.classes:
            raise ValueError(f"n_objects must be at most the number of classes, {spec.classes}, got {n_objects}")
        self.spec = spec
        self.name = type(spec).__name__
        self.recipe: Recipe = spec.training()
        self.n_objects = n_objects
        self.front = nn.Sequential()
        for name, module in layers.front.items():
            self.front.add_module(name, module)

    @property
    def n_parameters(self) -> int:
        """The number of parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self.parameters())

    @abstractmethod
    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Make an `Output` of images."""

    def summary(self) -> Summary:
        """Return the table of layers: shapes, parameters, multiply-adds."""
        return summarize(self)

    def __repr__(self) -> str:
        try:
            return str(self.summary())
        except Exception:  # a model that its owner has taken apart still prints, as any module does
            return super().__repr__()

    def loss(self) -> nn.Module:
        """Build the loss of the recipe: ``loss(output, labels, targets)``."""
        return self.recipe.loss.make(self.n_objects)

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

    def _enter(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check what comes in at the door; return images in the model's dtype, and class numbers to decode by."""
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            raise TypeError("images must be floating-point numbers in 0..1, got torch.uint8: take images.float() / 255")
        check_float(images, "images")
        channels, height, width = self.spec.image
        if images.dim() != 4 or tuple(images.shape[1:]) != self.spec.image:
            raise ValueError(
                f"images must be [B, {channels}, {height}, {width}], got {list(images.shape)}: "
                f"create_model(..., image=(channels, height, width)) builds the model for another size"
            )
        check_finite(images, "images")
        if labels is not None:
            if not isinstance(labels, Tensor):
                raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
            if labels.dim() == 0 or labels.shape[0] != images.shape[0]:
                raise ValueError(f"labels must be one for each of {images.shape[0]} images, got {list(labels.shape)}")
            if self.n_objects is None:
                as_multi_hot(labels, self.spec.classes)  # any number of them: nothing to decode, only to check
                labels = None
            else:
                labels = split_labels(labels, self.spec.classes, self.n_objects)[0]
        images = images.to(next(self.parameters()).dtype)
        if self.channels_last and images.device.type != "cuda" and not torch.compiler.is_compiling():
            images = images.clone(memory_format=torch.channels_last)  # with one channel a copy alone has the strides
        return images, labels


class CapsuleNetwork(Network):
    """A convolutional front, primary capsules, capsule layers, and scores read off the class capsules.

    Args:
        spec: what it is built from.
        layers: its layers, the last of them the class capsules.
        head: how class capsules are scored.
        schedule: of `torchcaps.nn.CapsuleStack`.
        decoder: widths of the decoder's hidden layers; ``None`` for no decoder.
        n_objects: objects in each image, each decoded by itself; ``None``: any number, and no decoder.
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
        self.capsules = CapsuleStack(layers.capsules, schedule)
        self.head = make_head(head, layers.dim)
        self.decoder = None if decoder is None else Decoder(spec.classes, layers.dim, spec.image, decoder)

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Make class capsules of images, and scores and reconstructions of those.

        In training the decoder is given the capsules that the labels name; otherwise, or without labels, those that are
        predicted (`decode` takes any). Of several objects in an image, those that were predicted rightly come in the
        order of the labels, so that each stands beside its own target. With ``trace`` the output holds every layer's
        couplings at every iteration.
        """
        images, numbers = self._enter(images, labels)
        primary = self.front(images)
        traces = None
        if trace:
            capsules, traces = self.capsules(primary, trace=True)
        else:
            capsules = self.capsules(primary)
        classes = capsules.flatten()
        scores = self.head(classes)
        reconstruction = None
        if self.decoder is not None:
            if numbers is None or not self.training:
                numbers = self._top_classes(scores, numbers)
            reconstruction = self.decoder(classes, numbers)
        return Output(scores, classes, reconstruction, traces)

    def decode(self, capsules: Capsules | Tensor | Output, labels: Tensor | None = None) -> Tensor:
        """Decode class capsules by any labels, whatever the mode; without labels by what they predict.

        Shapes:
            capsules ``[B, classes, D]``, labels ``[B]`` or ``[B, K] -> [B, C, H, W]`` or ``[B, K, C, H, W]``
        """
        if self.decoder is None:
            raise ValueError(f"{self.name} was built without a decoder: create_model(..., reconstruction=True)")
        if isinstance(capsules, Output):
            assert capsules.capsules is not None
            capsules = capsules.capsules
        classes = as_capsules(capsules)
        return self.decoder(classes, self._top_classes(self.head(classes)) if labels is None else labels)


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


class ConvNetwork(Network):
    """A plain convolutional network: images to logits. The papers' baselines."""

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Make logits of images. There is nothing to decode and nothing to trace."""
        images, _ = self._enter(images, labels)
        return Output(self.front(images), trace=() if trace else None)
