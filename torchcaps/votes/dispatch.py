"""Choice of the computation path of capsule layers: every threshold in one table, and the functions that use them.

A layer with ``streamed="auto"`` stores its votes or streams them (`choose_path`). A streamed reduction is computed by
the compiled kernel (`kernel_supports`), from weights that contain the couplings (`folds_mix` and
`torchcaps.votes.shared_coupling.shared_by_images`) or in chunks by torch. All paths compute the same values and
gradients up to rounding.

Values were set with `torchcaps bench` on two cores of an Intel Xeon (AVX-512, torch 2.13.0, one thread);
``results/bench/speed.json`` is the record of that machine with these values. `THRESHOLDS` lists them with the
measurement behind each.
"""

import enum
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.votes.cpu.build import has_kernel
from torchcaps.votes.reductions import Reduction, kernel_index
from torchcaps.votes.wiring import Wiring

__all__ = [
    "THRESHOLDS",
    "ChunkPlan",
    "Threshold",
    "VotePath",
    "assumed_batch_size",
    "choose_path",
    "describe_auto",
    "folds_mix",
    "kernel_is_fast",
    "kernel_supports",
    "uses_window_product",
]


# The table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """A number that a choice of path depends on.

    Args:
        value, unit: the number and its unit.
        meaning: the choice that depends on it.
        measurement: the measurement or reason behind the number.
    """

    value: int
    unit: str
    meaning: str
    measurement: str


THRESHOLDS: dict[str, Threshold] = {}


def _threshold(name: str, value: int, unit: str, meaning: str, measurement: str) -> int:
    """Add a row to `THRESHOLDS`; return its value."""
    THRESHOLDS[name] = Threshold(value, unit, meaning, measurement)
    return value


MAX_STORED_BYTES = _threshold(
    "MAX_STORED_BYTES",
    32 * 2**20,
    "bytes of votes per batch",
    "Larger votes are always streamed; smaller ones are stored unless the compiled kernel is faster.",
    "Up to this size torch reduces stored votes as fast as it streams them in chunks (set with the first streamed "
    "path, commit 5234e45; the measurement itself was not recorded). Larger votes cost memory: storing adds 260 MiB to "
    "sabour2017_mnist at batch 128, results/bench/training_memory.json.",
)
MIN_KERNEL_BYTES = _threshold(
    "MIN_KERNEL_BYTES",
    2**19,
    "bytes of votes per batch",
    "Votes larger than this are streamed if the compiled kernel is fast for the layer.",
    "Set with the kernel (commit ea1c108; sweep not recorded). results/bench/speed.json: the case 'small' (10 KiB of "
    "votes), which is below, is as fast as the stored path; 'dynamic-full' (90 MiB) is 29 times faster than the naive "
    "baseline.",
)
MIN_KERNEL_LANES = _threshold(
    "MIN_KERNEL_LANES",
    16,
    "lanes (images times output positions)",
    "Layers with fewer lanes are not streamed for speed.",
    "16 float32 lanes fill one AVX-512 register; fewer leave it partly empty. results/bench/speed.json, rows 'growth': "
    "the dense layer takes 2.7 ms per image at batch 8 (stored), 1.4 ms at 16 and 0.6 ms at 128 (kernel).",
)
MAX_FAST_KERNEL_PRODUCT = _threshold(
    "MAX_FAST_KERNEL_PRODUCT",
    256,
    "multiply-adds per row of a vote, X * Y",
    "Layers with larger transformation matrices are not streamed for speed: torch's matrix products are faster.",
    "Set for wide capsules in commit 816ae6f; the measurement was not recorded. The matrices of the benchmark's layers "
    "have 16 (inverted-conv, em-conv) and 128 (dynamic-full) multiply-adds per row.",
)
MAX_KERNEL_PRODUCT = _threshold(
    "MAX_KERNEL_PRODUCT",
    2**13,
    "multiply-adds per row of a vote, X * Y",
    "Reductions with larger matrices are computed in chunks by torch, even if the votes are streamed.",
    "Set together with MAX_FAST_KERNEL_PRODUCT in commit 816ae6f; the measurement was not recorded.",
)
MIN_THREAD_WORK = _threshold(
    "MIN_THREAD_WORK",
    2**21,
    "multiply-adds",
    "The kernel uses one thread per this much work, at most torch.get_num_threads().",
    "About 26 microseconds at the 81e9 multiply-adds per second of results/bench/speed.json, the order of the cost of "
    "starting a thread (set in commit ea1c108; sweep not recorded).",
)
MAX_CHUNK_LANES = _threshold(
    "MAX_CHUNK_LANES",
    256,
    "lanes",
    "Most lanes that the kernel processes at a time.",
    "Set with the kernel in commit ea1c108; the measurement was not recorded.",
)
MAX_PANEL_BYTES = _threshold(
    "MAX_PANEL_BYTES",
    2**17,
    "bytes",
    "Most memory of one value per lane, parent and pose component in the kernel; limits the lanes of a chunk.",
    "A fraction of the second-level cache, so that the panel stays in it (set in commit ea1c108; sweep not recorded).",
)
CHUNK_BYTES = _threshold(
    "CHUNK_BYTES",
    4 * 2**20,
    "bytes of votes per chunk",
    "Size of the chunks in which torch computes and reduces streamed votes.",
    "About the second-level cache of a core (set in commit 5234e45; sweep not recorded).",
)
TRACED_BATCH_SIZE = _threshold(
    "TRACED_BATCH_SIZE",
    32,
    "images",
    "Batch size assumed inside a traced graph, where the actual one may be symbolic.",
    "Not a measurement: a typical batch size, so that the graph does not depend on the example's (commit 83b12d1).",
)
MAX_WINDOW_PRODUCT_BATCH = _threshold(
    "MAX_WINDOW_PRODUCT_BATCH",
    4,
    "images",
    "Convolutions of at most this many images are computed as one matrix product with all windows.",
    "torch's convolution reorders its weights at each call, half of the time for one image of sabour2017_mnist. "
    "results/bench/speed.json: with it, inference of one image takes 9.0 ms (sabour-1) and 5.0 ms (tsai-1); at larger "
    "batches the reordering is amortised (commits ea1c108 and 350c7e1).",
)
MIN_WINDOW_PRODUCT_WEIGHTS = _threshold(
    "MIN_WINDOW_PRODUCT_WEIGHTS",
    2**20,
    "weights",
    "Convolutions with fewer weights (outside of capsule layers) always use torch's convolution.",
    "Reordering costs in proportion to the weights: the second convolution of sabour2017_mnist has 5.3 million (case "
    "'sabour-1' of results/bench/speed.json); set in commit ea1c108, sweep not recorded.",
)
META_CHUNKS = _threshold(
    "META_CHUNKS",
    2,
    "chunks",
    "Chunks computed on the meta device, where only shapes matter.",
    "Not a measurement: all later chunks have the same shapes, and two show the peak of one that replaces another "
    "(commit c63458d). The memory estimate of a large model then takes seconds.",
)


# Choices ------------------------------------------------------------------------------------------------------------


class VotePath(enum.Enum):
    """How a capsule layer computes with its votes."""

    STORED = "stored"
    """One tensor (`DenseVotes`)."""
    STREAMED_TORCH = "streamed by torch"
    """Recomputed in chunks by torch; single reductions may use the kernel."""
    STREAMED_KERNEL = "streamed by the compiled kernel"
    """Recomputed in registers by the compiled CPU kernel."""

    @property
    def is_streamed(self) -> bool:
        """Whether the votes are never stored as a whole."""
        return self is not VotePath.STORED


def choose_path(streamed: bool | Literal["auto"], weight: Tensor, vote_bytes: int, lanes: int) -> VotePath:
    """Return the path of a capsule layer.

    Args:
        streamed: the layer's option: ``False`` stores, ``True`` streams, ``"auto"`` chooses the faster path.
        weight: the layer's transformation matrices, ``[..., X, J, Y]``.
        vote_bytes: size of all votes of the batch.
        lanes: images times output positions.

    >>> weight = torch.empty(1152, 8, 10, 16)
    >>> choose_path("auto", weight, vote_bytes=40_000, lanes=64), choose_path(False, weight, 2**30, 64)
    (<VotePath.STORED: 'stored'>, <VotePath.STORED: 'stored'>)
    """
    if streamed == "auto":
        large = vote_bytes > MAX_STORED_BYTES
        if not large and (vote_bytes <= MIN_KERNEL_BYTES or lanes < MIN_KERNEL_LANES or not kernel_is_fast(weight)):
            return VotePath.STORED
    elif not streamed:
        return VotePath.STORED
    return VotePath.STREAMED_KERNEL if kernel_is_fast(weight) else VotePath.STREAMED_TORCH


def describe_auto(kernel: bool) -> str:
    """Return a sentence that explains the choice of ``streamed="auto"``, with or without a fast compiled kernel."""
    stored = f"{MAX_STORED_BYTES / 2**20:g} MiB"
    if not kernel:
        return (
            f"streamed='auto' streams votes of more than {stored}; no compiled kernel is available for these layers, "
            "with which streaming would be faster for smaller votes, too."
        )
    return (
        f"streamed='auto' streams votes of more than {MIN_KERNEL_BYTES / 2**20:g} MiB ({stored} if images times output "
        f"positions are fewer than {MIN_KERNEL_LANES}): the compiled kernel is faster than stored votes."
    )


def kernel_is_fast(weight: Tensor) -> bool:
    """Return whether the compiled kernel exists here and is faster than torch for these transformation matrices.

    The first call may compile the kernel. Meta tensors count as CPU tensors: they describe estimates for the CPU.
    """
    return (
        not torch.compiler.is_compiling()  # a graph must run on any machine
        and weight.dim() == 4
        and weight.shape[1] * weight.shape[3] <= MAX_FAST_KERNEL_PRODUCT
        and weight.device.type in ("cpu", "meta")
        and has_kernel(weight.dtype)
    )


def kernel_supports(
    reduction: type[Reduction], wiring: Wiring, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> bool:
    """Return whether the compiled kernel computes this reduction: plain CPU tensors, matrices shared by all positions.

    Meta tensors are supported for their shapes.
    """
    tensors = [tensor for tensor in (pose, weight, bias, *arguments) if tensor is not None]
    return (
        kernel_index(reduction) is not None
        and all(_is_plain(tensor, pose) for tensor in tensors)
        and weight.dim() == 4
        and weight.shape[1] * weight.shape[3] <= MAX_KERNEL_PRODUCT
        and (bias is None or math.prod(bias.shape[:-3]) == math.prod(wiring.sites[: bias.dim() - 3]) == 1)
        and pose.numel() > 0
        and not torch.compiler.is_compiling()
        and has_kernel(pose.dtype)
    )


def _is_plain(tensor: Tensor, like: Tensor) -> bool:
    """Return whether a tensor is strided memory of the same device and dtype as ``like``, not a subclass or wrapper."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type in ("cpu", "meta")
        and (tensor.device, tensor.dtype, tensor.layout) == (like.device, like.dtype, torch.strided)
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]
    )


def folds_mix(weight: Tensor, rows: int) -> bool:
    """Return whether `Votes.mix` multiplies its kernel into the weights instead of computing votes.

    This needs fewer multiply-adds if there are at most as many children as a vote has columns, ``I <= Y``: ``I``
    instead of ``Y`` per row of the weights. It requires vector poses and weights that are shared by all positions.

    Args:
        weight: transformation matrices, ``[I, X, J, Y]``.
        rows: rows of a pose, ``A``; 1 for vectors.
    """
    return weight.dim() == 4 and rows == 1 and weight.shape[0] <= weight.shape[-1]


def uses_window_product(batch_size: int) -> bool:
    """Return whether a convolution of this many images is computed as a matrix product with all windows."""
    return not torch.compiler.is_compiling() and batch_size <= MAX_WINDOW_PRODUCT_BATCH


# Chunks -------------------------------------------------------------------------------------------------------------


def assumed_batch_size(batch_size: int) -> int:
    """Return the batch size to choose a path by: a constant inside a traced graph, so that no size is baked in."""
    return TRACED_BATCH_SIZE if torch.compiler.is_compiling() else batch_size


@dataclass(frozen=True)
class ChunkPlan:
    """Parameters of a streamed reduction.

    Args:
        wiring: the child that each slot reads.
        rows: rows of a pose, ``A``.
        max_slots: largest number of slots per chunk; default: as many as fit into `CHUNK_BYTES`.
    """

    wiring: Wiring
    rows: int
    max_slots: int | None = None

    def slots_per_chunk(self, pose: Tensor, weight: Tensor) -> int:
        """Return the number of slots per chunk for these children and weights."""
        if self.max_slots is not None:
            return self.max_slots
        lanes = assumed_batch_size(pose.shape[0]) * math.prod(self.wiring.sites)
        slot_bytes = lanes * self.rows * weight.shape[-2] * weight.shape[-1] * pose.element_size()
        return max(1, min(self.wiring.types, CHUNK_BYTES // max(1, slot_bytes)))
