"""Scaling of computation time with batch size and routing iterations, for a dense and a convolutional layer."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, new_figure, save_figure, style_axes
from torchcaps.bench.timing import num_threads
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Dynamic, InvertedAttention

__all__ = ["draw_growth", "measure_growth"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ITERATIONS = (1, 2, 3, 4, 5, 6, 7, 8)
DENSE, CONV = "Dynamic, 1152x8 to 10x16", "InvertedAttention, 3x3, 8 to 8 types of 4x4"


def _make_layers(iterations: int) -> dict[str, tuple[CapsuleLayer, tuple[int, ...]]]:
    """Return the layers by name, each with the shape of its input without the batch."""
    torch.manual_seed(0)
    dense = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(iterations))
    conv = ConvCapsules(8, 16, 8, 16, 3, routing=InvertedAttention(iterations), pose="matrix")
    return {DENSE: (dense, (1152, 8)), CONV: (conv, (8, 8, 8, 16))}


def _shortest_seconds(layer: CapsuleLayer, children: Tensor, repeat: int) -> float:
    """Return the shortest CPU time of forward and backward."""

    def run() -> None:
        layer(children).pose.sum().backward()

    run()
    shortest = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        run()
        shortest = min(shortest, time.process_time() - start)
    return shortest


def measure_growth(repeat: int = 3) -> list[dict[str, Any]]:
    """Return record rows with the CPU time of forward and backward, by batch size and by routing iterations."""
    rows = []
    with num_threads(1):
        for axis, values in (("batch_size", BATCH_SIZES), ("iterations", ITERATIONS)):
            for value in values:
                layers = _make_layers(3 if axis == "batch_size" else value)
                for name, (layer, shape) in layers.items():
                    children = torch.randn(value if axis == "batch_size" else 32, *shape).requires_grad_()
                    seconds = _shortest_seconds(layer, children, repeat)
                    rows.append({"kind": "growth", "layer": name, "axis": axis, "value": value, "seconds": seconds})
    return rows


def draw_growth(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw time over batch size and over iterations; dotted lines are proportional to the batch size."""
    figure = new_figure(9, 3.6)
    by_batch, by_iterations = figure.subplots(1, 2)
    time_label = "forward and backward (ms of CPU time)"
    style_axes(by_batch, "", "batch size (3 iterations)", time_label)
    style_axes(by_iterations, "", "routing iterations (batch size 32)", time_label)
    for name, color in zip((DENSE, CONV), COLORS, strict=False):
        for axes, axis in ((by_batch, "batch_size"), (by_iterations, "iterations")):
            points = [(row["value"], row["seconds"]) for row in rows if row["axis"] == axis and row["layer"] == name]
            x, y = zip(*points, strict=True)
            axes.plot(x, [1e3 * seconds for seconds in y], color=color, marker="o", markersize=4, label=name)
            if axes is by_batch:
                axes.plot(x, [1e3 * y[-1] * value / x[-1] for value in x], color=color, linestyle=":", linewidth=1)
    by_batch.set_xscale("log", base=2)
    by_batch.set_yscale("log")
    by_iterations.set_ylim(bottom=0)
    by_iterations.plot([], [], color="#555555", linestyle=":", linewidth=1, label="proportional to the batch size")
    by_iterations.legend(frameon=False, fontsize=8)
    save_figure(figure, out)
