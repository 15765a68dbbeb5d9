"""From class capsules to scores: what a paper reads off them."""

from typing import Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.routing import Routing

__all__ = ["HeadName", "PoseLength", "PresenceHead", "SharedClassifier", "head_for", "make_head"]

HeadName = Literal["length", "normalized", "activation", "linear"]


class PoseLength(nn.Module):
    """A class is as present as its capsule is long: Sabour 2017, section 3; over ``sqrt(D)`` in Choi 2019.

    Shapes:
        capsules ``[B, J, D] -> [B, J]``
    """

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.normalized = normalized

    def extra_repr(self) -> str:
        """Say which length."""
        return f"normalized={self.normalized}"

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the lengths."""
        return capsules.length(self.normalized)


class PresenceHead(nn.Module):
    """A class is as present as its capsule's activation says: Hinton 2018.

    Shapes:
        capsules ``[B, J, D]`` with activations ``-> [B, J]``
    """

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the activations."""
        if capsules.activation is None:
            raise ValueError("capsules.activation must be given: these class capsules have none to score by")
        return capsules.activation


class SharedClassifier(nn.Module):
    """One linear map from a pose to a logit, the same for every class: Tsai 2020, section 3.4.

    It has ``D + 1`` parameters, whatever the number of classes. Where capsules have activations (ablation C) the pose
    is multiplied by its own first.

    Shapes:
        capsules ``[B, J, D] -> [B, J]``
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 1)

    def forward(self, capsules: Capsules) -> Tensor:
        """Return the logits."""
        pose = capsules.pose if capsules.activation is None else capsules.pose * capsules.activation.unsqueeze(-1)
        # The last axis alone is dropped: a bare squeeze() would also drop a batch of one.
        return self.linear(pose).squeeze(-1)


def head_for(routing: Routing) -> HeadName:
    """Return what scores the class capsules of a routing."""
    return routing.presence or "linear"


def make_head(name: HeadName, dim: int) -> nn.Module:
    """Build a head for class capsules of this pose size."""
    if name == "linear":
        return SharedClassifier(dim)
    return PresenceHead() if name == "activation" else PoseLength(normalized=name == "normalized")
