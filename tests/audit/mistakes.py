"""A minimal CapsNet in plain torch, and the known mistakes of public code, each re-created by one change."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PrimaryCapsules(nn.Module):
    """Primary capsules ``[B, positions * types, 8]``."""

    def __init__(self, channels: int = 16, types: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, types * 8, 9, stride=2)

    def group(self, channels: Tensor) -> Tensor:
        return channels.unflatten(1, (-1, 8)).permute(0, 3, 4, 1, 2).flatten(1, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.squash(self.group(self.convolution(features)))

    @staticmethod
    def squash(pose: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(pose, dim=-1, keepdim=True)
        return norm / (1 + norm * norm) * pose


class AcrossPositions(PrimaryCapsules):
    """A view of the channels-first tensor: a capsule is one channel at eight neighbouring positions."""

    def group(self, channels: Tensor) -> Tensor:
        return channels.reshape(len(channels), -1, 8)


class UndefinedAtZero(PrimaryCapsules):
    """The squash as printed, with a division by the norm."""

    @staticmethod
    def squash(pose: Tensor) -> Tensor:
        norm = (pose**2).sum(-1, keepdim=True).sqrt()
        return norm**2 / (1 + norm**2) * pose / norm


class DigitCapsules(nn.Module):
    """Dynamic routing from ``[B, I, 8]`` to ``[B, 10, 8]``."""

    def __init__(self, children: int, dim: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(children, dim, 10, 8))

    def votes(self, children: Tensor) -> Tensor:
        return torch.einsum("bik,ikjd->bijd", children, self.weight)

    def couple(self, logits: Tensor) -> Tensor:
        return logits.softmax(2)  # over the parents

    def agree(self, votes: Tensor, parents: Tensor) -> Tensor:
        return torch.einsum("bijd,bjd->bij", votes, parents)

    def couplings(self, children: Tensor) -> list[Tensor]:
        return self.route(self.votes(children))[1]

    def route(self, votes: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits, couplings = torch.zeros_like(votes[..., 0]), []
        for t in range(3):
            coupling = self.couple(logits)
            couplings.append(coupling)
            parents = self.squash(torch.einsum("bij,bijd->bjd", coupling, votes))
            if t < 2:
                logits = logits + self.agree(votes, parents)
        return parents, couplings

    def squash(self, pose: Tensor) -> Tensor:
        return PrimaryCapsules.squash(pose)

    def forward(self, children: Tensor) -> Tensor:
        return self.route(self.votes(children))[0]


class SoftmaxOverChildren(DigitCapsules):
    """The softmax over the wrong axis: children compete for a parent."""

    def couple(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)


class MixedImages(DigitCapsules):
    """The agreement is averaged over the batch, so that all images share their couplings."""

    def agree(self, votes: Tensor, parents: Tensor) -> Tensor:
        return super().agree(votes, parents).mean(0, keepdim=True).expand(votes.shape[:-1])


class ScrambledPoses(DigitCapsules):
    """A view instead of a transpose: votes of different children and parents are mixed."""

    def votes(self, children: Tensor) -> Tensor:
        votes = super().votes(children)
        batch, n_children, n_parents, dim = votes.shape
        return votes.reshape(batch, n_parents, n_children, dim).transpose(1, 2)


class NoSquash(DigitCapsules):
    """Parents without a squash: lengths are not probabilities."""

    def squash(self, pose: Tensor) -> Tensor:
        return pose


class CapsNet(nn.Module):
    """The correct network: class lengths, and the reconstruction from the capsule of the label or of the prediction."""

    primary_class: type[PrimaryCapsules] = PrimaryCapsules
    digit_class: type[DigitCapsules] = DigitCapsules

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 9)
        self.primary = self.primary_class()
        self.digits = self.digit_class(6 * 6 * 8)
        self.decoder = nn.Sequential(nn.Linear(80, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid())

    def encode(self, images: Tensor) -> Tensor:
        return self.primary(F.relu(self.conv(images)))

    def choose(self, lengths: Tensor, labels: Tensor | None) -> Tensor:
        return labels if labels is not None and self.training else lengths.argmax(1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        capsules = self.digits(self.encode(images))
        lengths = torch.linalg.vector_norm(capsules, dim=-1)
        mask = F.one_hot(self.choose(lengths, labels), 10).unsqueeze(-1)
        return lengths, self.decoder((capsules * mask).flatten(1))


class LeakedLabels(CapsNet):
    """The decoder is masked by the label in evaluation, too."""

    def choose(self, lengths: Tensor, labels: Tensor | None) -> Tensor:
        return lengths.argmax(1) if labels is None else labels


class SingleImageFails(CapsNet):
    """A squeeze that also removes the batch axis of a single image."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lengths, reconstruction = super().forward(images, labels)
        return lengths.squeeze(), reconstruction


class RandomEvaluation(CapsNet):
    """The functional dropout, which is active in evaluation mode by default."""

    def encode(self, images: Tensor) -> Tensor:
        return F.dropout(super().encode(images), 0.5)


class DetachedPrimary(CapsNet):
    """Children without gradients: the convolutions are never trained."""

    def encode(self, images: Tensor) -> Tensor:
        return super().encode(images).detach()


def variant(name: str, **classes: type) -> type[CapsNet]:
    """Return a network with another primary or digit layer."""
    return type(name, (CapsNet,), {f"{key}_class": value for key, value in classes.items()})


class ConvolutionalScramble(nn.Module):
    """A capsule convolution whose windows are unfolded with the wrong axes, as in one public release."""

    def __init__(self, correct: bool = False) -> None:
        super().__init__()
        self.weight, self.correct = nn.Parameter(torch.randn(9 * 3, 4, 4)), correct

    def forward(self, pose: Tensor) -> Tensor:
        """Map ``[B, H, W, 3, 4]`` to ``[B, H - 2, W - 2, 3, 4]``, without routing."""
        windows = pose.unfold(1, 3, 1).unfold(2, 3, 1)  # [B, H', W', 3, 4, 3, 3]
        batch, height, width = windows.shape[:3]
        windows = windows.permute((0, 1, 2, 5, 6, 3, 4) if self.correct else (0, 3, 4, 5, 6, 1, 2))
        slots = windows.reshape(batch, height, width, 27, 4)
        return torch.einsum("bhwik,ikd->bhwid", slots, self.weight).unflatten(3, (9, 3)).sum(3)


class WindowedNet(CapsNet):
    """A capsule convolution over 3x3 windows between the primary and the digit capsules."""

    correct = True

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Conv2d(16, 3 * 4, 9, stride=2)
        self.windows = ConvolutionalScramble(self.correct)
        self.digits = DigitCapsules(4 * 4 * 3, 4)

    def encode(self, images: Tensor) -> Tensor:
        features = self.primary(F.relu(self.conv(images)))
        pose = PrimaryCapsules.squash(features.unflatten(1, (3, 4)).permute(0, 3, 4, 1, 2))
        return PrimaryCapsules.squash(self.windows(pose)).flatten(1, 3)


class ScrambledWindowsNet(WindowedNet):
    """Windows unfolded with the wrong axes."""

    correct = False


# Each mistake with the check that must find it.
MISTAKES: dict[str, tuple[type[CapsNet], str]] = {
    "softmax over children": (variant("SoftmaxNet", digit=SoftmaxOverChildren), "coupling_sums"),
    "images of a batch mixed": (variant("MixedNet", digit=MixedImages), "batch_independence"),
    "poses scrambled by a view": (variant("ScrambledNet", digit=ScrambledPoses), "permutation_invariance"),
    "primary capsules across positions": (variant("AcrossNet", primary=AcrossPositions), "primary_positions"),
    "NaN at zero": (variant("ZeroNet", primary=UndefinedAtZero), "finite_values"),
    "labels in evaluation": (LeakedLabels, "decoder_labels"),
    "single image fails": (SingleImageFails, "batch_of_one"),
    "dropout in evaluation": (RandomEvaluation, "determinism"),
    "children detached": (DetachedPrimary, "parameter_gradients"),
    "no squash": (variant("LongNet", digit=NoSquash), "length_range"),
}
