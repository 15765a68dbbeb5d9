"""Stored against streamed votes: time and memory of a forward and a backward pass.

python -m benchmarks                      all cases, a table, and results/bench/streaming.json
python -m benchmarks digit-caps --repeat 10
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

from benchmarks.cases import CASES, Case
from benchmarks.memory import peak_bytes
from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"stored": False, "streamed": True}
LIMIT = 1e-5  # relative RMS in float32


def agreement(case: Case) -> float:
    """Return the largest relative RMS difference between the two ways: parents and all gradients."""
    results = []
    for streamed in WAYS.values():
        layer, children = case.build(streamed)
        pose = layer(children).pose
        # A random functional: the sum of squares of normalised poses has no gradient but rounding.
        direction = torch.randn(pose.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((pose * direction).sum(), [children.pose, layer.weight])
        results.append([pose.detach(), *gradients])
    pairs = zip(*results, strict=True)
    return max(float((a - b).square().mean().sqrt() / a.square().mean().sqrt()) for a, b in pairs)


def cpu_seconds(case: Case, repeat: int) -> dict[str, float]:
    """Return the least CPU time of several interleaved passes on one thread."""
    built = {way: case.build(streamed) for way, streamed in WAYS.items()}
    least = dict.fromkeys(WAYS, float("inf"))
    for _ in range(repeat):
        for way, (layer, children) in built.items():
            start = time.process_time()
            layer(children).pose.sum().backward()
            least[way] = min(least[way], time.process_time() - start)
    return least


def measure(name: str, repeat: int) -> dict[str, object]:
    case = CASES[name]
    difference = agreement(case)
    if not difference < LIMIT:
        sys.exit(f"bench: {name}: streamed differs from stored by {difference:.1e}, so it is not timed")
    seconds = cpu_seconds(case, repeat)
    peaks = {way: peak_bytes(name, way) for way in WAYS}
    return {
        "case": name,
        "title": case.title,
        "difference": difference,
        "vote_bytes": case.vote_bytes(),
        "cpu_seconds": seconds,
        "peak_bytes": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="passes of which the least counts (default: 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/bench/streaming.json", help="where the JSON goes")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"no case is named {name!r}: there are {', '.join(CASES)}")
    if arguments.repeat < 1:
        parser.error(f"--repeat must be 1 or more, got {arguments.repeat}")
    torch.set_num_threads(1)
    table = Table(box=box.SIMPLE_HEAD, title="forward and backward, float32, one thread; memory above the layer's own")
    for heading in ("layer", "votes", "stored: CPU", "memory", "streamed: CPU", "memory"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    rows = []
    names = arguments.cases or list(CASES)
    for name in track(names, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        row = measure(name, arguments.repeat)
        rows.append(row)
        cells = [row["title"], f"{row['vote_bytes'] / 2**20:.0f} MiB"]  # type: ignore[operator]
        for way in WAYS:
            cells += [f"{row['cpu_seconds'][way]:.2f} s", f"{row['peak_bytes'][way] / 2**20:.0f} MiB"]  # type: ignore[index]
        table.add_row(*map(str, cells))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    write_record(arguments.out, "benchmarks", rows)


if __name__ == "__main__":
    main()
