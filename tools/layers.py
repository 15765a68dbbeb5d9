"""Compare one layer of each routing with reference loops on real digits (`make layers`).

python tools/layers.py --digits 4 --seed 0
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import torchcaps
from torchcaps.capsules import Capsules
from torchcaps.data import DataError, Loader, create_dataset
from torchcaps.nn import ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing.base import ROUTINGS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the reference loops are in tests/

from tests.contract.reference import layer_difference  # noqa: E402

TYPES, DIM, CLASSES = 4, 4, 10


def load_digits(count: int, seed: int) -> Tensor:
    """Return ``count`` of the embedded digits, ``[count, 1, 28, 28]`` in 0..1."""
    try:
        loader = Loader(create_dataset("digits"), count, seed=seed)
    except DataError as error:
        sys.exit(f"layers: {error}")
    return loader.batch(epoch=0, batch_index=0).images.double()


def class_layers(name: str, children: Capsules) -> dict[str, CapsuleLayer]:
    """Return a fully-connected layer with ten classes and a convolutional layer with ten types."""
    _, height, width, types, dim = children.pose.shape
    routing = ROUTINGS.get(name)()
    dense = DenseCapsules(height * width * types, dim, CLASSES, dim, routing=routing, pose="matrix")
    conv = ConvCapsules(types, dim, CLASSES, dim, 3, 2, routing=routing, pose="matrix", grid=(height, width))
    return {"dense": dense.double().eval(), "conv": conv.double().eval()}


def seconds(layer: CapsuleLayer, children: Capsules) -> float:
    """Return the shortest time of five forward and backward passes."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        layer(children).pose.sum().backward()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=int, default=4, help="number of digits, 1 to 100 (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and digits (default: 0)")
    arguments = parser.parse_args()
    if not 1 <= arguments.digits <= 100:
        parser.error(f"--digits must be in 1..100 (the reference loops are slow), got {arguments.digits}")
    torch.set_num_threads(1)  # on layers this small, threads only add noise
    torch.manual_seed(arguments.seed)
    images = load_digits(arguments.digits, arguments.seed)
    children = PrimaryCapsules(1, TYPES, DIM, kernel_size=9, stride=4).double()(images)
    children = Capsules(children.pose.detach())

    console = Console(width=None if sys.stdout.isatty() else 100)
    height, width = children.pose.shape[1:3]
    table = Table(
        title=f"{arguments.digits} digits, {height}x{width} positions of {TYPES} capsules with 2x2 poses, float64",
        caption="difference: largest relative difference from the reference loops in\n"
        "tests/reference. conv: 3x3, stride 2. time: forward and backward.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("routing", no_wrap=True)
    table.add_column("layer", no_wrap=True)
    for heading in ("parameters", "output shape", "difference", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = [name for name in torchcaps.list_routings() if not ROUTINGS.get(name).approximate]  # these have no loops
    different = []
    for name in track(names, "routing", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        for kind, layer in class_layers(name, children).items():
            difference = layer_difference(layer, children)
            if not difference < 1e-9:
                different.append(f"{name} ({kind})")
            n_parameters = sum(p.numel() for p in layer.parameters())
            output = list(layer(children).pose.shape)
            time_taken = f"{1000 * seconds(layer, children):.1f} ms"
            title = ROUTINGS.get(name).__name__ if kind == "dense" else ""
            table.add_row(title, kind, f"{n_parameters:,}", str(output), f"{difference:.0e}", time_taken)
    console.print(table)
    if different:
        sys.exit(f"layers: these layers differ from the reference loops by 1e-9 or more: {', '.join(different)}")


if __name__ == "__main__":
    main()
