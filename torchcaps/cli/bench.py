"""``torchcaps bench``."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from torchcaps._core.registry import check_name
from torchcaps.bench.cases import CASES
from torchcaps.bench.growth import draw_growth, measure_growth
from torchcaps.bench.memory import MEMORY_CASES, measure_memory
from torchcaps.bench.record import write_record
from torchcaps.bench.timing import matmul_rate, measure_case
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser

__all__ = ["bench_command"]

PARTS = (*CASES, "memory", "growth")
DESCRIPTION = (
    "Measure layers and models of the papers: beside the usual way to write them in PyTorch, with which values and "
    "gradients are compared first, and beside what their multiply-adds alone would take. CPU time on one thread, then "
    "time on the clock with two; the least of interleaved repetitions. Examples: torchcaps bench; "
    "torchcaps bench dynamic-full inverted-conv --repeat 5; torchcaps bench memory; "
    "torchcaps bench growth --figure growth.png"
)


def bench_command(words: list[str]) -> None:
    """Measure how fast things are."""
    parser = Parser(prog="torchcaps bench", description=DESCRIPTION)
    parser.add_argument("parts", nargs="*", help=f"what to measure, of {', '.join(PARTS)}; all of it by default")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, of which the least counts")
    parser.add_argument("--out", type=str | None, help="a JSON file for what was measured")
    parser.add_argument("--figure", type=str | None, help="a PNG file for the growth of time")
    options, _ = parser.parse(words)
    if options.repeat < 1:
        parser.error(f"--repeat must be 1 or more, got {options.repeat}")
    parts = [check_name(name, PARTS, "the case") for name in options.parts] or list(PARTS)
    for name in (options.out, options.figure):
        if name is not None and not Path(name).expanduser().resolve().parent.is_dir():
            parser.error(f"{name} can't be written: there is no folder {Path(name).expanduser().parent}")
    rows = list(_measured(parts, options.repeat))
    _show(rows)
    growth = [row for row in rows if row["kind"] == "growth"]
    if options.figure is not None and growth:
        draw_growth(growth, Path(options.figure).expanduser())
        print(f"drawn in {options.figure}")
    if options.out is not None:
        write_record(Path(options.out).expanduser(), "torchcaps bench", rows)


def _measured(parts: list[str], repeat: int) -> Any:
    """Give the rows, one part after the other."""
    rate = matmul_rate() if set(parts) & set(CASES) else 0.0
    for name in track(parts, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        if name == "memory":
            yield from ({"kind": "memory", **measure_memory(case)} for case in MEMORY_CASES)
        elif name == "growth":
            yield from measure_growth(repeat)
        else:
            yield {"kind": "speed", "case": name, "matmul_rate": rate, **measure_case(CASES[name], repeat, rate)}


def _show(rows: list[dict[str, Any]]) -> None:
    speed = [row for row in rows if row["kind"] == "speed"]
    if speed:
        columns = ("usual", "ours", "faster", "at least", "aim", "x arithmetic", "two threads")
        table = start_table("case", *columns, right=columns)
        for row in speed:
            cpu = row["cpu_seconds"]
            above = f"{row['above_floor']:.1f}" + (
                f" (at most {row['most_above_floor']:g})" if row["most_above_floor"] else ""
            )
            cells = [f"{1e3 * cpu['usual']:.1f} ms", f"{1e3 * cpu['ours']:.1f} ms", f"{row['ratio']:.1f}x"]
            cells += [f"{row['least']:.2g}x", f"{row['aim']:g}x", above, f"{row['wall_ratio']:.1f}x"]
            table.add_row(row["title"], *cells)
        rate = speed[0]["matmul_rate"] / 1e9
        print(
            f"CPU time on one thread, where a matrix product does {rate:.0f} thousand million multiply-adds a second:"
        )
        print_table(table)
    for row in (row for row in rows if row["kind"] == "memory"):
        ours = row["ours"]
        words = (
            f"{row['model']}, a training step of {row['batch']}: {ours['above_bytes'] / 2**20:,.0f} MiB above the model"
        )
        if "usual" in row:
            share = row["usual"]["above_bytes"] / ours["above_bytes"]
            words += f", 1/{share:.1f} of the usual way's {row['usual']['above_bytes'] / 2**20:,.0f} MiB"
        print(f"{words}; {ours['process_bytes'] / 2**30:.2f} GiB in all")
    growth = [row for row in rows if row["kind"] == "growth"]
    for layer in dict.fromkeys(row["layer"] for row in growth):
        for axis in ("batch", "iterations"):
            points = [row for row in growth if row["layer"] == layer and row["axis"] == axis]
            words = ", ".join(f"{row['value']}: {1e3 * row['seconds']:.1f}" for row in points)
            print(f"{layer}, ms by {axis}: {words}")
