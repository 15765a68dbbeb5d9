"""Model output, and the heads that compute class scores from class capsules."""

from typing import Literal, NamedTuple

from torch import Tensor, nn

from torchcaps.capsules import Capsules, register_pytree
from torchcaps.routing import Routing
from torchcaps.routing.base import Trace

__all__ = [
    "ActivationHead",
    "HeadName",
    "LengthHead",
    "LogActivationHead",
    "Output",
    "SharedClassifier",
    "build_head",
    "default_head",
]

MIN_ACTIVATION = 1e-12  # of which a logarithm is taken

HeadName = Literal["length", "normalized", "activation", "log_activation", "linear", "sigmoid"]


class Output(NamedTuple):
    """Output of a model for a batch of images.

    Shapes:
        scores: ``[B, classes]``: lengths, normalised lengths, activations, logits or their sigmoids, depending on the
            head. The predicted classes are those of `Network.predict`.
        capsules: class capsules ``[B, classes, D]``; ``None`` for a network without capsules.
        reconstruction: ``[B, C, H, W]``, or ``[B, objects, C, H, W]`` for images with several objects; ``None``
            without a decoder.
        trace: one `torchcaps.routing.Trace` per capsule layer with its coupling coefficients at every iteration, if
            ``trace=True`` was passed to the model; otherwise ``None``.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> output = model(torch.rand(2, 1, 28, 28))
    >>> output.scores.shape, output.capsules.pose.shape, output.trace
    (torch.Size([2, 10]), torch.Size([2, 10, 16]), None)
    """

    scores: Tensor
    capsules: Capsules | None = None
    reconstruction: Tensor | None = None
    trace: tuple[Trace, ...] | None = None


register_pytree(Output, "torchcaps.models.Output")


class LengthHead(nn.Module):
    """Length of the class capsule as score: Sabour 2017, section 3; divided by ``sqrt(D)`` in Choi 2019, section 3.5.

    Shapes:
        capsules ``[B, J, D] -> [B, J]``
    """

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.normalized = normalized

    def extra_repr(self) -> str:
        """Return the constructor argument."""
        return f"normalized={self.normalized}"

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the lengths."""
        return capsules.length(self.normalized)


class ActivationHead(nn.Module):
    """Activation of the class capsule as score: Hinton 2018.

    Shapes:
        capsules ``[B, J, D]`` with activations ``-> [B, J]``
    """

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the activations."""
        if capsules.activation is None:
            raise ValueError("capsules.activation is None: the activation head needs class capsules with activations")
        return capsules.activation


class LogActivationHead(ActivationHead):
    """Logarithm of the activations divided by their sum, as log-probabilities for a cross-entropy: Hahn 2019.

    Shapes:
        capsules ``[B, J, D]`` with activations ``-> [B, J]``
    """

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the logarithms."""
        log = super().forward(capsules).clamp_min(MIN_ACTIVATION).log()
        return log.log_softmax(-1)


class SharedClassifier(nn.Module):
    """Linear map from a pose to a logit, shared by all classes: Tsai 2020, section 4.1.

    It has ``D + 1`` parameters for any number of classes. If the capsules have activations (ablation C), each pose is
    multiplied by its activation first.

    Args:
        dim: pose size.
        sigmoid: apply a sigmoid to the logits, for losses of scores in 0..1: margin and spread loss.

    Shapes:
        capsules ``[B, J, D] -> [B, J]``
    """

    def __init__(self, dim: int, sigmoid: bool = False) -> None:
        super().__init__()
        self.linear: nn.Linear = nn.Linear(dim, 1)
        self.sigmoid = sigmoid

    def extra_repr(self) -> str:
        """Return the constructor argument that the linear layer does not show."""
        return f"sigmoid={self.sigmoid}"

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the logits, or their sigmoids."""
        pose = capsules.pose if capsules.activation is None else capsules.pose * capsules.activation.unsqueeze(-1)
        # squeeze(-1) and not squeeze(), which would also drop the batch axis of a single image
        logits = self.linear(pose).squeeze(-1)
        return logits.sigmoid() if self.sigmoid else logits


def default_head(routing: Routing) -> HeadName:
    """Return the name of the head that fits a routing: by its activations or lengths, or else the linear head."""
    return routing.presence or "linear"


def build_head(name: HeadName, dim: int) -> nn.Module:
    """Build a head for class capsules of pose size ``dim``."""
    if name in ("linear", "sigmoid"):
        return SharedClassifier(dim, sigmoid=name == "sigmoid")
    if name == "log_activation":
        return LogActivationHead()
    return ActivationHead() if name == "activation" else LengthHead(normalized=name == "normalized")
