"""Alignment of a capsule's movement with one direction under rotation and shift: Choi 2019, section 4.4."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps.analysis.affine import transform
from torchcaps.analysis.alignment_figures import draw_alignment, draw_cosines
from torchcaps.analysis.common import Progress, batched_outputs, capsule_layers, require_capsules
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network
from torchcaps.nn import CapsuleLayer
from torchcaps.routing import Attention

__all__ = [
    "DEGREES",
    "PIXELS",
    "Alignment",
    "AlignmentOptions",
    "alignment_ratio",
    "capsule_differences",
    "measure_alignment",
    "opposite_cosines",
    "random_reference",
]

# The order of Choi 2019, Table 3: all transformations in one direction, then all in the other.
KINDS = ("rotation", "shift_x", "shift_y")
NAMES = ("rotation +", "x +", "y +", "rotation -", "x -", "y -")
DEGREES, PIXELS = (5.0, 10.0, 15.0, 20.0, 25.0), (1.0, 2.0, 3.0, 4.0, 5.0)


def alignment_ratio(differences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the alignment ratio of differences and their main direction: Choi 2019, eq. 15 and footnote 5.

    ``r_i = |<v_i, v>| / |v_i|`` with ``v`` the first right-singular vector of the matrix with rows ``v_i`` (no mean is
    subtracted), its sign such that ``Σ_i <v_i, v> > 0``. A single difference has ratio 1, a difference of length zero
    has ratio 0; if all are zero, so is the direction.

    Shapes:
        differences ``[..., n, D] ->`` ratio ``[..., n]``, direction ``[..., D]`` of length 1

    >>> ratio, direction = alignment_ratio(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> ratio.tolist(), direction.tolist()
    ([1.0, 0.0], [1.0, 0.0])
    """
    if not isinstance(differences, Tensor) or not differences.is_floating_point() or differences.dim() < 2:
        got = list(differences.shape) if isinstance(differences, Tensor) else type(differences).__name__
        raise ValueError(f"differences must be a floating-point tensor [..., n, D], got {got}")
    if not bool(torch.isfinite(differences).all()):
        raise ValueError("differences must be finite, got NaN or infinite values")
    lengths = torch.linalg.vector_norm(differences, dim=-1)  # [..., n]
    # Rows of Vh are the right-singular vectors: the first row, not the first column.
    first = torch.linalg.svd(differences, full_matrices=False).Vh[..., 0, :]  # [..., D]
    along = torch.einsum("...nd,...d->...n", differences, first)
    sign = torch.where(along.sum(-1, keepdim=True) < 0, -1.0, 1.0).to(first)
    nonzero = lengths > 0
    ratio = torch.where(nonzero, along.abs() / torch.where(nonzero, lengths, 1), 0).clamp_max(1)
    return ratio, torch.where(nonzero.any(-1, keepdim=True), sign * first, 0)


@functools.cache
def random_reference(
    n: int = 5, dim: int = 32, samples: int = 10_000, seed: int = 0, axis: Literal["row", "column"] = "row"
) -> tuple[float, float]:
    """Return mean and standard deviation of the alignment ratio of Gaussian random vectors.

    Five vectors in 32 dimensions have 0.462 ± 0.269. Choi 2019, Table 3, prints 0.311 ± 0.262, a root mean square of
    0.407, but the first singular direction carries at least a fifth of the squares of five vectors: 0.447 or more,
    weighted by length. The first *column* of numpy's ``VT`` as the direction gives 0.309 ± 0.261.

    Args:
        n: vectors per sample.
        dim: their dimension.
        samples: number of samples.
        seed: seed of the draws.
        axis: ``"row"`` of ``VT`` for the described procedure, ``"column"`` for the printed value.

    >>> mean, std = random_reference()
    >>> round(mean, 2), round(std, 2)
    (0.46, 0.27)
    """
    if axis not in ("row", "column"):
        raise ValueError(f"axis must be 'row' or 'column', got {axis!r}")
    if min(n, dim, samples) < 1:
        raise ValueError(f"n, dim and samples must be 1 or more, got {n}, {dim} and {samples}")
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(samples, n, dim, generator=generator, dtype=torch.float64)
    if axis == "row":
        ratio, _ = alignment_ratio(vectors)
    else:
        column = torch.linalg.svd(vectors, full_matrices=True).Vh[..., :, 0]
        ratio = torch.einsum("snd,sd->sn", vectors, column).abs() / torch.linalg.vector_norm(vectors, dim=-1)
    return float(ratio.mean()), float(ratio.std(correction=0))


@dataclass(frozen=True)
class Alignment:
    """Alignment ratios and cosines of class capsules under transformations: Choi 2019, Table 3 and Figure 4.

    Args:
        names: the six transformations, in the paper's order: rotation counter-clockwise, shift right, shift down, and
            the three opposite ones.
        ratios: mean alignment ratio by class and transformation, ``[classes, 6]``; 0 for a class without images.
        std: standard deviation of the single ratios, ``[classes, 6]``.
        averages: unweighted mean over the classes with images, ``[6]``.
        n: number of images of each class.
        cosines: cosine between the directions of + and -, for rotation, x and y: ``[N, 3]``.
        moved: whether both directions exist, ``[N, 3]``; false if a capsule does not move.
        labels: class of each image, ``[N]``.
        n_unmoved: number of differences of length zero, which are excluded from the means.
        reference: mean and standard deviation for random vectors, see `random_reference`.
        printed_reference: the same by the axis that gives the paper's number.
        before_tanh: whether capsules were taken before their tanh.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.analysis import measure_alignment
    >>> result = measure_alignment(model, torch.rand(2, 1, 28, 28), torch.tensor([3, 8]))
    >>> result.names[0], result.ratios.shape, result.cosines.shape
    ('rotation +', torch.Size([10, 6]), torch.Size([2, 3]))
    """

    names: tuple[str, ...]
    ratios: Tensor
    std: Tensor
    averages: Tensor
    n: tuple[int, ...]
    cosines: Tensor
    moved: Tensor
    labels: Tensor
    n_unmoved: int
    reference: tuple[float, float]
    printed_reference: tuple[float, float]
    before_tanh: bool


def measure_alignment(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Alignment:
    """Measure the alignment ratio of the true class's capsule: Choi 2019, section 4.4, Table 3.

    With ``T_i`` the five amounts of a transformation in one direction, ``v_i = u(T_i x) - u(x)``; their
    `alignment_ratio` is averaged over amounts and images of a class, then over classes. Misclassified images are
    included. The cosines (Figure 4) are those between the directions of opposite transformations. An untrained network
    is the control: it scores like a trained one.

    Args:
        model: a capsule network for one object per image.
        images: ``[N, C, H, W]``, as the model takes them; transformed images are padded with zeros.
        labels: class indices ``[N]``, or zeros and ones ``[N, classes]``.
        degrees: rotations, applied in both directions.
        pixels: shifts, applied in both directions; whole pixels are exact.
        before_tanh: use ``K_n s_n + k_n`` instead of its tanh (attention routing only). The paper's equation has
            capsules after the tanh, the authors' notebook reads them before it. Computed as ``artanh`` of the pose: in
            float32 values above 8 are imprecise, and 8.7 is the largest.
        batch_size: images per forward pass.
        progress: called after each transformation (30, and the identity) of each batch.

    Deviation: the authors' notebook leaves the sign of a direction, and with it that of each cosine, to the SVD; we
    follow footnote 5.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> result = measure_alignment(model, torch.rand(2, 1, 28, 28), torch.tensor([3, 8]))
    >>> result.n, bool((result.averages <= 1).all())
    ((0, 0, 0, 1, 0, 0, 0, 0, 1, 0), True)
    """
    arguments = (degrees, pixels, before_tanh, batch_size, progress)
    differences, indices = capsule_differences(model, images, labels, *arguments)
    ratio, direction = alignment_ratio(differences)  # [N, 6, n], [N, 6, D]
    nonzero = (differences.abs().sum(-1) > 0).double()
    n_classes = model.spec.classes
    means, deviations = torch.zeros(n_classes, 6), torch.zeros(n_classes, 6)
    for label in indices.unique().tolist():
        class_ratio, weight = ratio[indices == label], nonzero[indices == label]
        total = weight.sum((0, 2)).clamp_min(1)
        mean = (class_ratio * weight).sum((0, 2)) / total
        means[label] = mean
        deviations[label] = (((class_ratio - mean[:, None]).square() * weight).sum((0, 2)) / total).sqrt()
    n = torch.bincount(indices, minlength=n_classes)
    cosines, moved = opposite_cosines(direction)
    return Alignment(
        names=NAMES,
        ratios=means,
        std=deviations,
        averages=means[n > 0].mean(0),
        n=tuple(n.tolist()),
        cosines=cosines.float(),
        moved=moved,
        labels=indices,
        n_unmoved=int((nonzero == 0).sum()),
        reference=random_reference(len(degrees), differences.shape[-1]),
        printed_reference=random_reference(len(degrees), differences.shape[-1], axis="column"),
        before_tanh=before_tanh,
    )


def capsule_differences(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``u(T x) - u(x)`` of the true class's capsule for all transformations, and the class indices.

    The arguments are those of `measure_alignment`.

    Shapes:
        ``[N, 6, n, D]`` in float64, the six in the order of `Alignment.names`; class indices ``[N]``
    """
    network = require_capsules(model, "the alignment of capsules")
    if model.n_objects != 1:
        raise ValueError(
            f"the alignment of capsules needs one object per image, but images of {model.name} have several"
        )
    last = list(capsule_layers(network).values())[-1]
    if before_tanh and not (isinstance(last, CapsuleLayer) and isinstance(last.routing, Attention)):
        raise ValueError(f"before_tanh needs class capsules by Attention routing, but {model.name} has no tanh there")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [N, C, H, W] with at least one image, got {list(images.shape)}")
    if len(labels) != len(images):
        raise ValueError(f"labels must have one entry per image ({len(images)}), got {len(labels)}")
    if not len(degrees) == len(pixels) > 0 or min(*degrees, *pixels) <= 0:
        raise ValueError(f"degrees and pixels must be equally many positive numbers, got {degrees} and {pixels}")
    indices = split_labels(labels, model.spec.classes)[0].cpu()
    transformations = [
        (kind, sign * float(amount))
        for sign in (1, -1)
        for kind, amounts in zip(KINDS, (degrees, pixels, pixels), strict=True)
        for amount in amounts
    ]

    def class_pose(part: Tensor, part_indices: Tensor) -> Tensor:
        """Return the pose of each image's class capsule, without its tanh if ``before_tanh``: ``[B, D]``."""
        (output,) = batched_outputs(network, part, batch_size=batch_size, progress=progress)
        assert output.capsules is not None
        poses = output.capsules.pose.cpu()[torch.arange(len(part_indices)), part_indices]  # [B, D]
        largest = 1 - torch.finfo(poses.dtype).eps / 2
        return poses.double().clamp(-largest, largest).atanh() if before_tanh else poses.double()

    differences = []
    for start in range(0, len(images), batch_size):
        part, part_indices = images[start : start + batch_size], indices[start : start + batch_size]
        original = class_pose(part, part_indices)
        moved = [class_pose(transform(part, kind, amount), part_indices) - original for kind, amount in transformations]
        differences.append(torch.stack(moved, dim=1).unflatten(1, (6, len(degrees))))
    return torch.cat(differences), indices


def opposite_cosines(direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines between the directions of + and -, and whether both exist: ``[N, 6, D] -> [N, 3]`` each."""
    positive, negative = direction.unflatten(1, (2, 3)).unbind(1)
    moved = (positive.abs().sum(-1) > 0) & (negative.abs().sum(-1) > 0)
    return (positive * negative).sum(-1).clamp(-1, 1), moved


# Declarations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlignmentOptions:
    """Options of the analyses ``alignment``, ``cosines`` and ``trajectories``.

    Args:
        before_tanh: read capsules before their tanh, as the authors' notebook does (attention routing only).
    """

    before_tanh: bool = False


def run_on_subject(subject: Subject, options: AlignmentOptions, function: Any = measure_alignment) -> Any:
    """Call `measure_alignment`, or a function with the same arguments, on the images of a subject."""
    batch = subject.batch()
    return function(
        subject.model,
        batch.images,
        batch.labels,
        before_tanh=options.before_tanh,
        batch_size=subject.batch_size,
        progress=subject.track((1 + 2 * (len(DEGREES) + 2 * len(PIXELS))) * subject.n_batches()),
    )


def _summarize_alignment(result: Alignment, classes: Sequence[str]) -> Summary:
    """Return the summary table: alignment ratio by class and transformation, and the average over classes."""
    rows = {classes[label]: result.ratios[label] for label, count in enumerate(result.n) if count}
    rows["average"] = result.averages
    values = {name: dict(zip(result.names, row.tolist(), strict=True)) for name, row in rows.items()}
    columns = {name: Column(name, ".3f") for name in result.names}
    mean, std = result.reference
    notes = [f"Random vectors have {mean:.3f} ± {std:.3f}."]
    if result.n_unmoved:
        notes.append(f"{result.n_unmoved:,} differences of length zero are excluded.")
    details = {"random": {"mean": mean, "std": std}}
    return Summary("alignment ratio", sum(result.n), "class", columns, values, tuple(notes), details)


def _summarize_cosines(result: Alignment, classes: Sequence[str]) -> Summary:
    """Return the summary table: mean cosine between opposite transformations, and the fraction below 0."""
    rows: dict[str, dict[str, Any]] = {}
    for n, name in enumerate(("rotation", "x shift", "y shift")):
        values = result.cosines[:, n][result.moved[:, n]]
        rows[name] = {
            "images": len(values),
            "mean": float(values.mean()) if len(values) else None,
            "opposite": float((values < 0).double().mean()) if len(values) else None,
        }
    formats = {"images": ("images", ",d"), "mean": ("mean cosine", ".3f"), "opposite": ("below 0", "percent")}
    columns = {name: Column(*column) for name, column in formats.items()}
    note = "−1: opposite transformations move the capsule in opposite directions; +1: in the same direction."
    title = "cosine between the directions of + and −"
    return Summary(title, sum(result.n), "transformation", columns, rows, (note,))


ALIGNMENT = register_analysis(
    Analysis(
        "alignment",
        "alignment ratio of a capsule's movement under rotations and shifts",
        run_on_subject,
        _summarize_alignment,
        draw_alignment,
        AlignmentOptions,
        n_images=200,
    )
)
COSINES = register_analysis(
    Analysis(
        "cosines",
        "cosine between a capsule's directions of movement under opposite transformations",
        run_on_subject,
        _summarize_cosines,
        lambda result, out, title, classes: draw_cosines(result, out, title),
        AlignmentOptions,
        n_images=200,
    )
)
