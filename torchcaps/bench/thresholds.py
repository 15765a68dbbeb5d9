"""Measurement of the thresholds of `torchcaps.votes.dispatch`: both alternatives on both sides of each number.

A threshold that chooses between two paths has a crossover: the size at which both take equally long. A threshold that
sets a size, such as that of a chunk, has a fastest value. Both alternatives of a point compute the same values and
gradients, which is checked, and are timed forward and backward, interleaved.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps.bench.cases import Work
from torchcaps.bench.timing import num_threads, relative_difference, shortest_seconds
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.conv import Convolution
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Dynamic, InvertedAttention, Routing
from torchcaps.votes.cpu.build import has_kernel
from torchcaps.votes.dispatch import THRESHOLDS, override_thresholds

__all__ = ["SWEEPS", "Point", "Sweep", "find_crossover", "measure_threshold"]

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
MAX_DIFFERENCE = 1e-4  # relative RMS difference of the two alternatives, float32
UNLIMITED = 2**60
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Point:
    """The two alternatives at one size.

    Args:
        at: the size that the threshold is compared with.
        works: the computation by each alternative. Choice between two paths: first the one that is used below the
            threshold. Size: first the one with size ``at``, then the one with the threshold's value.
    """

    at: int
    works: dict[str, Work]


@dataclass(frozen=True)
class Sweep:
    """Sizes on both sides of a threshold, for one layer.

    Args:
        threshold: its name in `THRESHOLDS`.
        title: the layer.
        result: ``"crossover"`` for a choice between two paths, ``"optimum"`` for a size.
        make: prepares the alternatives for a size and a count; `Point.at` is the size that is attained.
        count: number of children, images or channels of the layer, whichever the size does not determine.
        smoke: count and two sizes that take milliseconds, to test the command.
        threads: torch's number of threads; wall time is measured if there are several, CPU time otherwise.
        kernel: whether the compiled kernel is needed.
    """

    threshold: str
    title: str
    result: Literal["crossover", "optimum"]
    make: Callable[[int, int], Point] = field(repr=False)
    count: int
    smoke: tuple[int, int, int]
    threads: int = 1
    kernel: bool = True

    def sizes(self) -> list[int]:
        """Return the sizes to measure, `FACTORS` times the threshold, without those that round to 0."""
        return [size for factor in FACTORS if (size := int(factor * THRESHOLDS[self.threshold].value))]


# Computations ---------------------------------------------------------------------------------------------------


def _step(layer: CapsuleLayer, shape: tuple[int, ...], **thresholds: int) -> Work:
    """Return forward and backward of a layer under changed thresholds, with the gradients of children and weights."""
    torch.manual_seed(1)
    children = torch.randn(shape).requires_grad_()
    inputs = [children, layer.weight]

    def run() -> list[Tensor]:
        with override_thresholds(**thresholds):
            pose = layer(children).pose
            return [pose.detach(), *torch.autograd.grad(pose, inputs, torch.ones_like(pose))]

    return Work(run, 0)


def _dense_step(
    batch: int, sizes: tuple[int, int, int, int], routing: Routing, streamed: bool, **thresholds: int
) -> Work:
    """Return `_step` of a dense layer; sizes: children, their dimension, parents, their dimension."""
    torch.manual_seed(0)
    layer = DenseCapsules(*sizes, routing=routing, streamed=streamed)
    return _step(layer, (batch, *sizes[:2]), **thresholds)


def _stored_or_kernel(batch: int, sizes: tuple[int, int, int, int]) -> dict[str, Work]:
    """Return dynamic routing with stored votes and by the compiled kernel."""
    return {
        "stored": _dense_step(batch, sizes, Dynamic(3), False),
        "kernel": _dense_step(batch, sizes, Dynamic(3), True, MAX_KERNEL_PRODUCT=UNLIMITED),
    }


def _max_stored_bytes(size: int, count: int) -> Point:
    """Return stored votes and chunks by torch, for a number of children."""
    image_bytes = count * 10 * 16 * FLOAT_BYTES
    batch, sizes = max(1, size // image_bytes), (count, 8, 10, 16)
    works = {
        "stored": _dense_step(batch, sizes, Dynamic(2), False),
        "chunks by torch": _dense_step(batch, sizes, Dynamic(2), True, MAX_KERNEL_PRODUCT=0),
    }
    return Point(batch * image_bytes, works)


def _min_kernel_bytes(size: int, count: int) -> Point:
    """Return stored votes and the kernel, for a number of images."""
    child_bytes = count * 10 * 16 * FLOAT_BYTES
    children = max(1, size // child_bytes)
    return Point(children * child_bytes, _stored_or_kernel(count, (children, 8, 10, 16)))


def _min_kernel_lanes(size: int, count: int) -> Point:
    """Return stored votes and the kernel, for a number of children; a dense layer has one lane per image."""
    return Point(size, _stored_or_kernel(size, (count, 8, 10, 16)))


def _matrix_size(product: int) -> tuple[int, int]:
    """Return X and Y, powers of 2 with X <= Y and the given product."""
    columns = 2 ** (int(math.log2(product)) // 2)
    return columns, product // columns


def _max_fast_kernel_product(size: int, count: int) -> Point:
    """Return the kernel and stored votes, for a number of images."""
    columns, outs = _matrix_size(size)
    works = _stored_or_kernel(count, (4096 // outs, columns, 10, outs))
    return Point(size, {name: works[name] for name in ("kernel", "stored")})  # small matrices: the kernel


def _max_kernel_product(size: int, count: int) -> Point:
    """Return the kernel and chunks by torch, for a number of images."""
    columns, outs = _matrix_size(size)
    sizes = (max(1, 4096 // outs), columns, 10, outs)
    works = {
        "kernel": _dense_step(count, sizes, Dynamic(2), True, MAX_KERNEL_PRODUCT=UNLIMITED),
        "chunks by torch": _dense_step(count, sizes, Dynamic(2), True, MAX_KERNEL_PRODUCT=0),
    }
    return Point(size, works)


def _min_thread_work(size: int, count: int) -> Point:
    """Return one and two threads, for a number of images; the size is the work of each of the two."""
    dim, parents, parent_dim = 8, 10, 16
    per_child = count * dim * parents * parent_dim
    children = max(2, 2 * size // per_child)
    sizes = (children, dim, parents, parent_dim)
    works = {
        "one thread": _dense_step(count, sizes, Dynamic(2), True, MIN_THREAD_WORK=UNLIMITED),
        "two threads": _dense_step(count, sizes, Dynamic(2), True, MIN_THREAD_WORK=1),
    }
    return Point(children * per_child // 2, works)


def _max_chunk_lanes(size: int, count: int) -> Point:
    """Return chunks of two sizes, for a number of images; few parents, so that panels are small with many lanes."""

    def step(lanes: int) -> Work:
        sizes = (128, 8, 4, 8)
        return _dense_step(count, sizes, Dynamic(2), True, MAX_CHUNK_LANES=lanes, MAX_PANEL_BYTES=UNLIMITED)

    return Point(size, {"this size": step(size), "threshold": step(THRESHOLDS["MAX_CHUNK_LANES"].value)})


def _max_panel_bytes(size: int, count: int) -> Point:
    """Return panels of two sizes, for a number of images; a lane has 512 values, as in Tsai 2020."""

    def step(n_bytes: int) -> Work:
        """Return `_step` of a convolutional layer with panels of at most this many bytes."""
        torch.manual_seed(0)
        layer = ConvCapsules(8, 16, 32, 16, 3, routing=InvertedAttention(2), pose="matrix", streamed=True)
        shape = (count, 6, 6, 8, 16)
        return _step(layer, shape, MAX_PANEL_BYTES=n_bytes, MAX_CHUNK_LANES=UNLIMITED)

    return Point(size, {"this size": step(size), "threshold": step(THRESHOLDS["MAX_PANEL_BYTES"].value)})


def _chunk_bytes(size: int, count: int) -> Point:
    """Return chunks of two sizes, for a number of images."""

    def step(n_bytes: int) -> Work:
        return _dense_step(count, (1152, 8, 10, 16), Dynamic(2), True, CHUNK_BYTES=n_bytes, MAX_KERNEL_PRODUCT=0)

    return Point(size, {"this size": step(size), "threshold": step(THRESHOLDS["CHUNK_BYTES"].value)})


def _convolution(batch: int, channels: tuple[int, int], kernel: int, grid: int, window_product: bool) -> Work:
    """Return the inference of a convolution with stride 2, by a matrix product with all windows or by torch."""
    torch.manual_seed(0)
    layer = Convolution(*channels, kernel, 2)
    images = torch.randn(batch, channels[0], grid, grid).to(memory_format=torch.channels_last)  # as in `Network`
    limits = {"MAX_WINDOW_PRODUCT_BATCH": UNLIMITED, "MIN_WINDOW_PRODUCT_WEIGHTS": 0 if window_product else UNLIMITED}

    def run() -> list[Tensor]:
        with override_thresholds(**limits), torch.no_grad():
            return [layer(images)]

    return Work(run, 0)


def _max_window_product_batch(size: int, count: int) -> Point:
    """Return a matrix product and a convolution, for a number of channels."""

    def make(window_product: bool) -> Work:
        """Return `_convolution` of a batch of ``size`` images, by a matrix product or by torch."""
        return _convolution(size, (count, count), 9, 20, window_product)

    return Point(size, {"window product": make(True), "convolution": make(False)})


def _min_window_product_weights(size: int, count: int) -> Point:
    """Return a convolution and a matrix product, for a number of images."""
    channels = _matrix_size(size // 16)

    def make(window_product: bool) -> Work:
        return _convolution(count, channels, 4, 14, window_product)

    return Point(16 * channels[0] * channels[1], {"convolution": make(False), "window product": make(True)})


SWEEPS = {
    sweep.threshold: sweep
    for sweep in (
        Sweep(
            "MAX_STORED_BYTES",
            "Dynamic(2), 1152x8 to 10x16, by batch size, without kernel",
            "crossover",
            _max_stored_bytes,
            1152,
            (16, 2**14, 2**15),
            kernel=False,
        ),
        Sweep(
            "MIN_KERNEL_BYTES",
            "Dynamic(3), 8 to 10x16, batch 32, by number of children",
            "crossover",
            _min_kernel_bytes,
            32,
            (2, 2**13, 2**14),
        ),
        Sweep(
            "MIN_KERNEL_LANES",
            "Dynamic(3), 1152x8 to 10x16, by batch size",
            "crossover",
            _min_kernel_lanes,
            1152,
            (16, 1, 2),
        ),
        Sweep(
            "MAX_FAST_KERNEL_PRODUCT",
            "Dynamic(3), 10 parents, batch 32, 5 MiB of votes, by dimensions",
            "crossover",
            _max_fast_kernel_product,
            32,
            (1, 2**4, 2**5),
        ),
        Sweep(
            "MAX_KERNEL_PRODUCT",
            "Dynamic(2), 10 parents, batch 32, 5 MiB of votes, by dimensions",
            "crossover",
            _max_kernel_product,
            32,
            (1, 2**4, 2**5),
        ),
        Sweep(
            "MIN_THREAD_WORK",
            "Dynamic(2), 8 to 10x16, batch 32, by number of children",
            "crossover",
            _min_thread_work,
            32,
            (2, 2**10, 2**12),
            threads=2,
        ),
        Sweep(
            "MAX_CHUNK_LANES",
            "Dynamic(2), 128x8 to 4x8, batch 2048",
            "optimum",
            _max_chunk_lanes,
            2048,
            (32, 2**4, 2**5),
        ),
        Sweep(
            "MAX_PANEL_BYTES",
            "InvertedAttention(2), 3x3, 8 to 32 types of 4x4, batch 32",
            "optimum",
            _max_panel_bytes,
            32,
            (1, 2**15, 2**16),
        ),
        Sweep(
            "CHUNK_BYTES",
            "Dynamic(2), 1152x8 to 10x16, batch 64, without kernel",
            "optimum",
            _chunk_bytes,
            64,
            (1, 2**18, 2**19),
            kernel=False,
        ),
        Sweep(
            "MAX_WINDOW_PRODUCT_BATCH",
            "convolution 9x9 s2, 256 to 256 channels, 20x20, inference",
            "crossover",
            _max_window_product_batch,
            256,
            (4, 1, 2),
            kernel=False,
        ),
        Sweep(
            "MIN_WINDOW_PRODUCT_WEIGHTS",
            "convolution 4x4 s2, 14x14, inference of one image, by channels",
            "crossover",
            _min_window_product_weights,
            1,
            (1, 2**10, 2**11),
            kernel=False,
        ),
    )
}


# Measurement ----------------------------------------------------------------------------------------------------


def measure_threshold(name: str, repeat: int = 3, smoke: bool = False) -> dict[str, Any]:
    """Return the record row of a threshold: the times of both alternatives at all sizes, and what follows from them.

    Args:
        name: the threshold.
        repeat: number of interleaved repetitions; the shortest counts.
        smoke: measure two tiny sizes only.
    """
    sweep = SWEEPS[name]
    if sweep.kernel and not has_kernel(torch.float32):
        raise ValueError(f"{name} can't be measured without the compiled kernel: install a C++ compiler such as g++")
    with num_threads(sweep.threads):
        count, *sizes = sweep.smoke if smoke else (sweep.count, *sweep.sizes())
        points = [_measure_point(sweep, sweep.make(size, count), repeat) for size in sizes]
    row = {
        "kind": "threshold",
        "threshold": name,
        "value": THRESHOLDS[name].value,
        "unit": THRESHOLDS[name].unit,
        "title": sweep.title,
        "clock": "CPU time" if sweep.threads == 1 else "wall time",
        "threads": sweep.threads,
        "points": points,
    }
    ratios = {point["at"]: point["ratio"] for point in points}
    if sweep.result == "crossover":
        return {**row, "crossover": find_crossover(ratios, THRESHOLDS[name].value)}
    best = min(ratios, key=lambda at: ratios[at])
    return {**row, "optimum": best, "optimum_ratio": ratios[best]}


def _measure_point(sweep: Sweep, point: Point, repeat: int) -> dict[str, Any]:
    """Compare and time both alternatives at one size; the ratio is the first one's time divided by the second one's."""
    first, second = point.works
    difference = relative_difference(point.works[first].run(), point.works[second].run())
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"{sweep.threshold} at {point.at}: {first} and {second} differ by {difference:.1e} (at most "
            f"{MAX_DIFFERENCE:g} is accepted), so they are not timed"
        )
    seconds = shortest_seconds(point.works, repeat, time.process_time if sweep.threads == 1 else time.perf_counter)
    return {"at": point.at, "seconds": seconds, "ratio": seconds[first] / seconds[second], "difference": difference}


def find_crossover(ratios: dict[int, float], value: float) -> float | None:
    """Return the size at which the alternatives take equally long, or ``None`` if one is faster at all sizes.

    Interpolated on logarithmic scales. If noise causes several crossovers, the one nearest to ``value`` counts.

    Args:
        ratios: by size, in increasing order: time of the alternative for small sizes divided by that of the other.
        value: the threshold.

    >>> find_crossover({1: 0.5, 4: 2.0, 16: 8.0}, value=1)
    2.0
    """
    pairs = itertools.pairwise((math.log(at), math.log(ratio)) for at, ratio in ratios.items())
    crossovers = [math.exp(x0 - y0 * (x1 - x0) / (y1 - y0)) for (x0, y0), (x1, y1) in pairs if y0 < 0 <= y1]
    return min(crossovers, key=lambda at: abs(math.log(at / value)), default=None)
