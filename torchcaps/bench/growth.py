"""How time grows: with the batch and with the iterations, for the dense and the convolutional layer."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.bench.timing import threads
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Dynamic, InvertedAttention

__all__ = ["draw_growth", "measure_growth"]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ITERATIONS = (1, 2, 3, 4, 5, 6, 7, 8)
COLOURS = {"Dynamic, 1152x8 to 10x16": "#0072b2", "InvertedAttention, 3x3, 8 to 8 types of 4x4": "#d55e00"}


def _layers(iterations: int) -> dict[str, tuple[CapsuleLayer, tuple[int, ...]]]:
    torch.manual_seed(0)
    dense = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(iterations))
    conv = ConvCapsules(8, 16, 8, 16, 3, routing=InvertedAttention(iterations), pose="matrix")
    return dict(zip(COLOURS, ((dense, (1152, 8)), (conv, (8, 8, 8, 16))), strict=True))


def _seconds(layer: CapsuleLayer, children: Tensor, repeat: int) -> float:
    """Return the least CPU time of forward and backward."""

    def run() -> None:
        layer(children).pose.sum().backward()

    run()
    least = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        run()
        least = min(least, time.process_time() - start)
    return least


def measure_growth(repeat: int = 3) -> list[dict[str, Any]]:
    """Return the CPU time of forward and backward for each batch, and for each number of iterations."""
    rows = []
    with threads(1):
        for axis, values in (("batch", BATCHES), ("iterations", ITERATIONS)):
            for value in values:
                layers = _layers(3 if axis == "batch" else value)
                for name, (layer, shape) in layers.items():
                    children = torch.randn(value if axis == "batch" else 32, *shape).requires_grad_()
                    seconds = _seconds(layer, children, repeat)
                    rows.append({"kind": "growth", "layer": name, "axis": axis, "value": value, "seconds": seconds})
    return rows


def draw_growth(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw time over batch and over iterations, with what growing in proportion would be."""
    figure = import_optional("matplotlib.figure", "drawing").Figure(figsize=(9, 3.6), layout="constrained")
    import_optional("matplotlib.backends.backend_agg", "drawing").FigureCanvasAgg(figure)
    for axes, axis in zip(figure.subplots(1, 2), ("batch", "iterations"), strict=True):
        for name, colour in COLOURS.items():
            points = [(r["value"], r["seconds"]) for r in rows if r["axis"] == axis and r["layer"] == name]
            x, y = zip(*points, strict=True)
            axes.plot(x, [1e3 * seconds for seconds in y], color=colour, marker="o", markersize=4, label=name)
            if axis == "batch":
                axes.plot(x, [1e3 * y[-1] * value / x[-1] for value in x], color=colour, linestyle=":", linewidth=1)
        if axis == "batch":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("images in a batch (3 iterations)" if axis == "batch" else "iterations (32 images)")
        axes.set_ylabel("forward and backward, ms of CPU")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[1].plot([], [], color="#555555", linestyle=":", linewidth=1, label="in proportion to the batch")
    figure.axes[1].legend(frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
