"""Draw the figures of the site's introduction: squash, votes and wiring (docs/images/{squash,votes,wiring}.png).

python tools/concept_figures.py RUN     # a run of capsnet_small, for the votes
"""

import sys
from pathlib import Path
from typing import Any

import torch

import torchcaps
from torchcaps._core.plotting import COLORS, new_figure, save_figure, show_image, style_axes
from torchcaps.data import Loader, create_dataset
from torchcaps.models import CapsuleNetwork
from torchcaps.nn import exp_squash, squash
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.votes import Wiring

OUT = Path(__file__).resolve().parent.parent / "docs/images"
DIGIT, OTHER = 5, 3  # class of the drawn digit, and one that it resembles


def draw_squash() -> None:
    """Draw the length after both squashes by the length before."""
    figure = new_figure(5.2, 3)
    axes = figure.subplots()
    lengths = torch.linspace(0, 5, 200)
    vectors = torch.stack([lengths, torch.zeros_like(lengths)], dim=-1)
    for function, label, color in ((squash, "squash (Sabour 2017)", 0), (exp_squash, "exp_squash (Chen 2019)", 1)):
        axes.plot(lengths, function(vectors).norm(dim=-1), color=COLORS[color], label=label)
    style_axes(axes, "", "length before", "length after")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, OUT / "squash.png")


def draw_votes(network: CapsuleNetwork) -> None:
    """Draw the votes of all children for two classes: along the parent's pose, and the largest variation across."""
    batch = next(Loader(create_dataset("digits", "test"), 1000).epoch(0))
    image = batch.images[batch.labels == DIGIT][:1]
    layer = next(module for module in network.modules() if isinstance(module, CapsuleLayer))
    inputs: list[Any] = []
    handle = layer.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        output = network(image, trace=True)
        handle.remove()
        votes = layer.votes(inputs[0]).dense()[0]  # [I, J, D]
    assert output.trace is not None
    assert output.capsules is not None
    coupling = output.trace[-1].couplings[-1]
    assert coupling is not None
    figure = new_figure(8.4, 3.2)
    left, *panels = figure.subplots(1, 3, width_ratios=[0.7, 1, 1])
    show_image(left, image[0])
    limit = 1.05 * float(votes[:, [DIGIT, OTHER]].norm(dim=-1).max())
    for axes, parent in zip(panels, (DIGIT, OTHER), strict=True):
        pose = output.capsules.pose[0, parent]
        along = votes[:, parent] @ (pose / pose.norm())
        rest = votes[:, parent] - along[:, None] * pose / pose.norm()
        across = rest @ torch.linalg.svd(rest, full_matrices=False)[2][0]
        size = 60 * coupling[0, :, parent] / coupling[0].max()
        axes.scatter(along, across, s=size, color=COLORS[0], alpha=0.35, linewidths=0)
        mean = float((coupling[0, :, parent] * along).sum() / coupling[0, :, parent].sum())
        axes.axvline(mean, color=COLORS[1], label=f"mean {mean:.3f}")
        style_axes(axes, f"class {parent}: length {float(pose.norm()):.2f}", "along the parent", "across")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.set_xlim(-limit, limit)
        axes.set_ylim(-limit, limit)
    save_figure(figure, OUT / "votes.png")


def draw_wiring() -> None:
    """Draw the children on a 6x6 grid that one parent reads, in a dense and in two convolutional layers."""
    figure = new_figure(7.2, 2.6)
    dense = torch.ones(6, 6)
    panels: list[tuple[str, torch.Tensor]] = [("dense: every parent", dense)]
    wiring = Wiring(1, (6, 6), kernel=(3, 3))
    for title, position in (("convolution 3x3: parent (0, 0)", 0), ("convolution 3x3: parent (2, 1)", 2 * 4 + 1)):
        read = torch.zeros(36)
        index = wiring.index(torch.device("cpu")).reshape(16, -1)[position]
        read[index[index >= 0]] = 1
        panels.append((title, read.reshape(6, 6)))
    for axes, (title, read) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.imshow(read, cmap="Blues", vmin=0, vmax=1.6)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(torch.arange(-0.5, 6).tolist(), [])
        axes.set_yticks(torch.arange(-0.5, 6).tolist(), [])
        axes.grid(color="#999999", linewidth=0.6)
        axes.tick_params(length=0)
    save_figure(figure, OUT / "wiring.png")


if __name__ == "__main__":
    draw_squash()
    draw_wiring()
    trained = torchcaps.load_run(sys.argv[1]).model
    assert isinstance(trained, CapsuleNetwork)
    draw_votes(trained)
