"""Choice of the computation path of capsule layers: every threshold in one table, and the functions that use them.

A layer with ``streamed="auto"`` stores its votes or streams them (`choose_path`). A streamed reduction is computed by
the compiled CPU kernel (`kernel_supports`), by Triton kernels on a GPU
(`torchcaps.votes.triton.support.triton_supports`), from weights that contain the couplings (`folds_mix` and
`torchcaps.votes.shared_coupling.shared_by_images`) or in chunks by torch. All paths compute the same values and
gradients up to rounding.

`THRESHOLDS` lists the numbers with the measurement behind each: ``torchcaps bench thresholds`` times both alternatives
on both sides of every number and records the crossovers in ``results/bench/thresholds.json``, which names the machine.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps._core.values import in_vmap_or_forward_mode
from torchcaps.votes.base import VotePath
from torchcaps.votes.cpu.build import has_kernel
from torchcaps.votes.reductions import Reduction, kernel_index
from torchcaps.votes.triton.support import has_triton_for
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
    "override_thresholds",
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
        measured: the size at which both alternatives take equally long, or the fastest size, in the row of this name in
            ``results/bench/thresholds.json``, rounded; ``None`` if that row has no crossover or there is no row.
        recorded: whether there is a row; otherwise ``measurement`` gives the reason for the number.
    """

    value: int
    unit: str
    meaning: str
    measurement: str
    measured: float | None = None
    recorded: bool = True


THRESHOLDS: dict[str, Threshold] = {}


def _threshold(name: str, threshold: Threshold) -> int:
    """Add a row to `THRESHOLDS`; return its value."""
    THRESHOLDS[name] = threshold
    return threshold.value


MAX_STORED_BYTES = _threshold(
    "MAX_STORED_BYTES",
    Threshold(
        32 * 2**20,
        "bytes of votes per batch",
        "Larger votes are always streamed; smaller ones are stored unless the compiled kernel is faster.",
        "Without the kernel, streaming in chunks by torch is as fast as stored votes at a quarter to a third of this "
        "size and 1.5 to 2 times as fast at this size. The number is not lowered because the rounding of recorded "
        "results depends on the path. Larger votes cost memory: storing adds 260 MiB to sabour2017_mnist at batch "
        "128, results/bench/training_memory.json.",
        8.9e6,
    ),
)
MIN_KERNEL_BYTES = _threshold(
    "MIN_KERNEL_BYTES",
    Threshold(
        2**19,
        "bytes of votes per batch",
        "Votes larger than this are streamed if the compiled kernel is fast for the layer.",
        "At this size the kernel is as fast as stored votes, at 8 times this size twice as fast. "
        "results/bench/speed.json: the case 'small' (10 KiB of votes) is stored; 'dynamic-full' (90 MiB) is 29 times "
        "faster than the naive baseline.",
        4.3e5,
    ),
)
MIN_KERNEL_LANES = _threshold(
    "MIN_KERNEL_LANES",
    Threshold(
        16,
        "lanes (images times output positions)",
        "Layers with fewer lanes are not streamed for speed.",
        "16 float32 lanes fill one AVX-512 register; fewer leave it partly empty. The kernel is as fast as stored "
        "votes at 8 lanes and about twice as fast at 16.",
        8,
    ),
)
MAX_FAST_KERNEL_PRODUCT = _threshold(
    "MAX_FAST_KERNEL_PRODUCT",
    Threshold(
        256,
        "multiply-adds per row of a vote, X * Y",
        "Layers with larger transformation matrices are not streamed for speed: torch's matrix products are faster.",
        "The kernel is faster than stored votes up to at least this size, matrices of 16x16. The matrices of the "
        "papers' layers have 16 to 128 multiply-adds per row.",
        680,
    ),
)
MAX_KERNEL_PRODUCT = _threshold(
    "MAX_KERNEL_PRODUCT",
    Threshold(
        2**13,
        "multiply-adds per row of a vote, X * Y",
        "Reductions with larger matrices are computed in chunks by torch, even if the votes are streamed.",
        "Between 64x64 and 64x128 the kernel becomes slower than chunks by torch, at 8 times this size by a third.",
        6.0e3,
    ),
)
MIN_THREAD_WORK = _threshold(
    "MIN_THREAD_WORK",
    Threshold(
        2**21,
        "multiply-adds",
        "The kernel uses one thread per this much work, at most torch.get_num_threads().",
        "About 26 microseconds at the 81e9 multiply-adds per second of results/bench/speed.json, the order of the "
        "cost of starting a thread. The record has the wall times of one and two threads by work per thread.",
    ),
)
MAX_CHUNK_LANES = _threshold(
    "MAX_CHUNK_LANES",
    Threshold(
        256,
        "lanes",
        "Most lanes that the kernel processes at a time.",
        "64 to 512 lanes take equally long within a few percent; 1024 takes 1.1 to 1.2 times as long.",
        128,
    ),
)
MAX_PANEL_BYTES = _threshold(
    "MAX_PANEL_BYTES",
    Threshold(
        2**17,
        "bytes",
        "Most memory of one value per lane, parent and pose component in the kernel; limits the lanes of a chunk.",
        "A fraction of the second-level cache, so that the panel stays in it: a half or twice of this size takes "
        "equally long within 10 %, 8 times this size takes 1.5 times as long.",
        2**17,
    ),
)
CHUNK_BYTES = _threshold(
    "CHUNK_BYTES",
    Threshold(
        4 * 2**20,
        "bytes of votes per chunk",
        "Size of the chunks in which torch computes and reduces streamed votes.",
        "1 to 8 MiB take equally long within 10 %; 0.5 MiB takes 1.4 times as long.",
        4 * 2**20,
    ),
)
TRACED_BATCH_SIZE = _threshold(
    "TRACED_BATCH_SIZE",
    Threshold(
        32,
        "images",
        "Batch size assumed inside a traced graph, where the actual one may be symbolic.",
        "Not a measurement: a typical batch size, so that the graph does not depend on the example's.",
        recorded=False,
    ),
)
MAX_WINDOW_PRODUCT_BATCH = _threshold(
    "MAX_WINDOW_PRODUCT_BATCH",
    Threshold(
        4,
        "images",
        "Convolutions of at most this many images are computed as one matrix product with all windows.",
        "torch's convolution reorders its weights at each call, which is amortised by larger batches. For one image "
        "of the second convolution of sabour2017_mnist the product takes a third of the time or less, for 4 images "
        "0.4 to 0.6. The copy of all windows takes memory in proportion to the images.",
        25,
    ),
)
MIN_WINDOW_PRODUCT_WEIGHTS = _threshold(
    "MIN_WINDOW_PRODUCT_WEIGHTS",
    Threshold(
        2**20,
        "weights",
        "Convolutions with fewer weights (outside of capsule layers) always use torch's convolution.",
        "Reordering costs in proportion to the weights: for one image the product takes half of the time from this "
        "size on. It is also faster for the smaller sizes of the record, where it saves less than a millisecond.",
    ),
)
META_CHUNKS = _threshold(
    "META_CHUNKS",
    Threshold(
        2,
        "chunks",
        "Chunks computed on the meta device, where only shapes matter.",
        "Not a measurement: all later chunks have the same shapes, and two show the peak of one that replaces "
        "another. The memory estimate of a large model then takes seconds.",
        recorded=False,
    ),
)


@contextmanager
def override_thresholds(**values: int) -> Iterator[None]:
    """Replace thresholds by name inside the context, to measure or test the alternatives. Not thread-safe.

    >>> with override_thresholds(MAX_WINDOW_PRODUCT_BATCH=0):
    ...     uses_window_product(1)
    False
    """
    unknown = set(values) - set(THRESHOLDS)
    if unknown:
        raise ValueError(f"unknown threshold {min(unknown)!r}: expected names in THRESHOLDS")
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield
    finally:
        globals().update(before)


# Choices ------------------------------------------------------------------------------------------------------------


def choose_path(streamed: bool | Literal["auto"], weight: Tensor, vote_bytes: int, lanes: int) -> VotePath:
    """Return the path of a capsule layer.

    Inside ``torch.vmap`` and forward-mode differentiation votes are stored: streamed reductions have rules for neither.

    Args:
        streamed: the layer's option: ``False`` stores, ``True`` streams, ``"auto"`` chooses the faster path.
        weight: the layer's transformation matrices, ``[..., X, J, Y]``.
        vote_bytes: size of all votes of the batch.
        lanes: images times output positions.

    >>> weight = torch.empty(1152, 8, 10, 16)
    >>> choose_path("auto", weight, vote_bytes=40_000, lanes=64), choose_path(False, weight, 2**30, 64)
    (<VotePath.STORED: 'stored'>, <VotePath.STORED: 'stored'>)
    """
    if in_vmap_or_forward_mode():
        return VotePath.STORED
    if streamed == "auto":
        large = vote_bytes > MAX_STORED_BYTES
        if not large and (vote_bytes <= MIN_KERNEL_BYTES or lanes < MIN_KERNEL_LANES or not kernel_is_fast(weight)):
            return VotePath.STORED
    elif not streamed:
        return VotePath.STORED
    if has_triton_for(weight):
        return VotePath.STREAMED_TRITON
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
        not torch.compiler.is_compiling()  # a graph must run on any machine
        and kernel_index(reduction) is not None
        and all(_is_plain(tensor, pose) for tensor in tensors)
        and weight.dim() == 4
        and weight.shape[1] * weight.shape[3] <= MAX_KERNEL_PRODUCT
        and (bias is None or math.prod(bias.shape[:-3]) == math.prod(wiring.sites[: bias.dim() - 3]) == 1)
        and pose.numel() > 0
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


def uses_window_product(batch_size: int, n_weights: int | None = None) -> bool:
    """Return whether a convolution of this many images is computed as a matrix product with all windows.

    Args:
        batch_size: number of images.
        n_weights: number of weights; ``None`` for capsule layers, whose weights are reordered for a convolution anyway.
    """
    return (
        not torch.compiler.is_compiling()  # first: a traced graph is for any batch size
        and batch_size <= MAX_WINDOW_PRODUCT_BATCH
        and (n_weights is None or n_weights >= MIN_WINDOW_PRODUCT_WEIGHTS)
    )


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
