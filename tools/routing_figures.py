"""Draw the couplings of every routing on one digit, for the pages of the site.

    python tools/routing_figures.py [NAME ...]

Trains ``capsnet_small`` with each routing for three epochs on the embedded digits (about ten seconds each), writes
docs/images/routings/NAME.png, and records accuracy and range of the couplings in docs/images/routings/record.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcaps
from torchcaps._core.plotting import new_figure, save_figure, show_image
from torchcaps.data import Loader, create_dataset
from torchcaps.models import CapsuleNetwork
from torchcaps.routing import Equilibrium, InvertedAttention, Routing, create_routing

OUT = Path(__file__).resolve().parent.parent / "docs/images/routings"
RECORD = OUT / "record.json"
EPOCHS = 3
DIGIT = 5  # class of the digit that is drawn


def routing_of(name: str) -> Routing:
    """Return a registered routing with its default fields; `Equilibrium` of inverted attention."""
    return Equilibrium(InvertedAttention()) if name == "equilibrium" else create_routing(name)


def train(name: str, out: Path) -> tuple[CapsuleNetwork, float]:
    """Return the trained network and its accuracy on the 1,000 test digits."""
    settings: dict[str, Any] = {"routing": routing_of(name), "epochs": EPOCHS, "seed": 0, "num_threads": 1}
    run = torchcaps.fit("capsnet_small", "digits", out=out / name, quiet=True, figures=False, **settings)
    assert isinstance(run.network, CapsuleNetwork)
    assert run.test is not None
    return run.network, run.test.accuracy


def coupling_maps(network: CapsuleNetwork, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the couplings to each class, summed over the child types at each position, and the scores.

    Shapes:
        image ``[1, 1, 28, 28]`` ``-> [T, J, 6, 6], [J]``
    """
    with torch.no_grad():
        output = network(image, trace=True)
    assert output.trace is not None
    maps = []
    for coupling in output.trace[-1].couplings:
        assert coupling is not None
        children, parents = coupling.shape[1:]
        types = children // 36
        maps.append(coupling[0].detach().reshape(6, 6, types, parents).sum(2).permute(2, 0, 1))
    return torch.stack(maps), network.probabilities(output)[0]


def bar_limits(maps: Tensor, middle: float, largest: float) -> tuple[float, float]:
    """Return the ends of the colour bar: colours are symmetric about ``middle``, couplings need not be.

    Args:
        maps: the coupling maps.
        middle: value that is white.
        largest: distance of the last colours from the middle.
    """
    lowest, highest = float(maps.min()), float(maps.max())
    return (lowest if lowest < 0 else max(middle - largest, 0.0)), max(highest, middle)


def draw(name: str, network: CapsuleNetwork) -> tuple[float, float]:
    """Draw the digit and the maps of each iteration; return smallest and largest coupling map of the last one."""
    batch = next(Loader(create_dataset("digits", "test"), 1000).epoch(0))
    image = batch.images[batch.labels == DIGIT][:1]
    maps, scores = coupling_maps(network, image)
    axis = routing_of(name).coupling_axis
    middle = 0.0 if axis is None else 8 / 10 if axis == "parents" else 8 / 288
    if name == "quadratic":
        middle = 8.0  # the initial coefficients are 1
    largest = float((maps - middle).abs().max())
    if largest < 1e-6:  # uniform couplings
        largest = middle
    n_iterations, n_classes = maps.shape[:2]
    figure = new_figure(9.6, 0.98 * n_iterations + 0.3)
    grid = figure.subplots(n_iterations, n_classes + 1, squeeze=False)
    heat = None
    for t in range(n_iterations):
        for j, axes in enumerate(grid[t]):
            axes.set_xticks([])
            axes.set_yticks([])
            if j == 0:
                show_image(axes, image[0])
                axes.set_title("input" if n_iterations == 1 else f"iteration {t + 1}", fontsize=8)
                continue
            colors: dict[str, Any] = {"cmap": "PuOr_r", "vmin": middle - largest, "vmax": middle + largest}
            # The receptive fields of the six rows and columns have their centres at 8, 10, ... 18.
            heat = axes.imshow(maps[t, j - 1].numpy(), extent=(7, 19, 19, 7), interpolation="nearest", **colors)
            axes.contour(image[0, 0].numpy(), levels=[0.5], colors="k", linewidths=0.6)
            axes.set_xlim(-0.5, 27.5)
            axes.set_ylim(27.5, -0.5)
            axes.set_facecolor("#dddddd")
            if t == 0:
                axes.set_title(f"{j - 1}: {float(scores[j - 1]):.2f}", fontsize=8)
    bar = figure.colorbar(heat, ax=grid[:, 1:], shrink=0.9, aspect=12 * n_iterations, pad=0.01)
    bar.ax.set_ylim(*bar_limits(maps, middle, largest))
    bar.ax.tick_params(labelsize=7)
    bar.set_label("coupling", fontsize=8)
    save_figure(figure, OUT / f"{name}.png")
    return float(maps[-1].min()), float(maps[-1].max())


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or torchcaps.list_routings():
            network, accuracy = train(name, Path(scratch))
            low, high = draw(name, network)
            record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            record[name] = {"accuracy": accuracy, "epochs": EPOCHS, "smallest": low, "largest": high}
            RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            print(f"{name}: {100 * accuracy:.1f} %, couplings per position {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
