"""The command ``torchcaps bench``."""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from torchcaps._core.files import write_atomic
from torchcaps._core.machine import describe_machine, record_header
from torchcaps._core.optional import import_optional
from torchcaps._core.registry import check_name
from torchcaps.bench.cases import CASES
from torchcaps.bench.data import measure_data
from torchcaps.bench.growth import draw_growth, measure_growth
from torchcaps.bench.images import IMAGE_CASES, measure_images
from torchcaps.bench.iterations import REFERENCE, measure_iterations
from torchcaps.bench.memory import (
    ESTIMATE_CASES,
    MEMORY_CASES,
    compare_with_estimates,
    compare_with_naive,
    parse_estimate_case,
)
from torchcaps.bench.steps import measure_steps
from torchcaps.bench.thresholds import SWEEPS, measure_threshold
from torchcaps.bench.timing import matmul_rate, measure_case
from torchcaps.bench.training import measure_training
from torchcaps.cli.bench_routings import ROUTINGS, bench_routings_command
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser

__all__ = ["bench_command"]

Row = dict[str, Any]

DEFAULT_PARTS = (*CASES, "memory", "growth")
OTHER_PARTS = ("iterations", "steps", "estimates", "data", "training", "explorer", "thresholds", *IMAGE_CASES)
DESCRIPTION = (
    "Measure speed and memory. Layers and models of the papers are compared with a naive PyTorch baseline (values and "
    "gradients first) and with the time of their multiply-adds in a large matrix product: CPU time on one thread, wall "
    "time with two threads, the shortest of interleaved repetitions. 'memory': peak memory of training. 'growth': time "
    "by batch size and iterations. 'iterations': time per iteration of the routings, relative to inverted attention. "
    "'estimates': estimated against measured training memory. 'data': data loading. 'steps': training "
    "steps compiled by torch.compile and in bfloat16. "
    "'training': overhead of the training loop, processes, start-up time. 'explorer': time of a request of torchcaps "
    "explore. 'thresholds': the sizes at which one path of the votes becomes faster than another, next to the "
    "thresholds that choose between them. 'images-32', 'images-64' and 'images-held-out': accuracy of the default "
    "model for own images against a plain CNN after the same CPU time, with --repeat seeds (downloads CIFAR-10). "
    "'routings', with flags of its own (torchcaps bench routings --help): accuracy and cost of every routing."
)
EXAMPLES = (
    "torchcaps bench",
    "torchcaps bench dynamic-full inverted-conv --repeat 5",
    "torchcaps bench growth --figure growth.png",
    "torchcaps bench tsai2020_cifar10:32:streamed",
    "torchcaps bench data --out results/bench/data.json",
    "torchcaps bench explorer --repeat 20",
    "torchcaps bench thresholds --out results/bench/thresholds.json",
    "torchcaps bench images-32 --out results/bench/images_32.json",
    "torchcaps bench MIN_KERNEL_BYTES",
    "torchcaps bench routings --plan",
)


def bench_command(words: list[str]) -> None:
    """Run benchmarks, print the results and, if requested, write a record."""
    if words[:1] == [ROUTINGS]:
        bench_routings_command(words[1:])
        return
    parser = Parser(prog="torchcaps bench", description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"parts to run: {', '.join(DEFAULT_PARTS)} (default: these), {', '.join(OTHER_PARTS)}, the name of a "
        "threshold such as MIN_KERNEL_BYTES, or MODEL:BATCH_SIZE[:auto|stored|streamed] to compare one memory estimate",
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="number of repetitions, of which the shortest counts, or of seeds"
    )
    parser.add_argument("--smoke", type=bool, default=False, help="measure two tiny sizes per threshold")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the parts 'images-...'")
    parser.add_argument("--out", type=str | None, help="JSON file to write the results to")
    parser.add_argument("--figure", type=str | None, help="image file for the figure of the part 'growth'")
    options, _ = parser.parse(words)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    parts = options.parts or list(DEFAULT_PARTS)
    for part in parts:
        if ":" in part:
            parse_estimate_case(part)
        else:
            check_name(part, (*DEFAULT_PARTS, *OTHER_PARTS, *SWEEPS), "part")
    for flag in ("out", "figure"):
        path = getattr(options, flag)
        if path is not None and not Path(path).expanduser().resolve().parent.is_dir():
            parser.error(f"--{flag} {path}: the directory {Path(path).expanduser().parent} does not exist")
    rows = list(_measure(parts, options.repeat, options.smoke, options.seed))
    for print_rows in (
        _print_speed,
        _print_memory,
        _print_growth,
        _print_iterations,
        _print_steps,
        _print_estimates,
        _print_data,
        _print_training,
        _print_explorer,
        _print_images,
        _print_thresholds,
    ):
        print_rows(rows)
    growth = _of_kind(rows, "growth")
    if options.figure is not None and growth:
        draw_growth(growth, Path(options.figure).expanduser())
        print(f"figure written to {options.figure}")
    if options.out is not None:
        record = {**record_header(), "seed": options.seed, "machine": describe_machine(), "rows": rows}
        write_atomic(Path(options.out).expanduser(), json.dumps(record, indent=2) + "\n", ValueError)
        print(f"results written to {options.out}")


def _measure(parts: list[str], repeat: int, smoke: bool, seed: int) -> Iterator[Row]:
    """Yield the record rows of all parts; show a progress bar on a terminal."""
    steps = [step for part in parts for step in (SWEEPS if part == "thresholds" else [part])]
    rate = matmul_rate() if set(steps) & set(CASES) else 0.0
    groups: dict[str, Callable[[], Iterable[Row]]] = {
        "memory": lambda: ({"kind": "memory", **compare_with_naive(case)} for case in MEMORY_CASES),
        "growth": lambda: measure_growth(repeat),
        "iterations": lambda: measure_iterations(repeat),
        "steps": lambda: measure_steps(repeat),
        "estimates": lambda: compare_with_estimates(ESTIMATE_CASES),
        "data": lambda: measure_data(repeat),
        "training": lambda: measure_training(repeat),
        "explorer": lambda: _measure_explorer(repeat),
        **{
            name: functools.partial(measure_images, name, case, range(seed, seed + repeat))
            for name, case in IMAGE_CASES.items()
        },
    }
    for step in track(steps, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        if step in groups:
            yield from groups[step]()
        elif step in SWEEPS:
            yield measure_threshold(step, repeat, smoke)
        elif ":" in step:
            yield from compare_with_estimates([step])
        else:
            speed = measure_case(CASES[step], repeat, rate)
            yield {"kind": "speed", "case": step, "matmul_rate": rate, **speed}


def _measure_explorer(repeat: int) -> Iterable[Row]:
    """Measure requests of the explorer, which needs an extra of its own."""
    import_optional("fastapi", "the benchmark of the explorer")
    from torchcaps.explorer.benchmark import measure_explorer

    return measure_explorer(repeat)


def _of_kind(rows: list[Row], kind: str) -> list[Row]:
    """Return the rows of one kind of benchmark."""
    return [row for row in rows if row["kind"] == kind]


def _print_rows(rows: list[Row], left: tuple[str, ...], right: tuple[str, ...], cells: Callable[[Row], Any]) -> None:
    """Print a table of rows, if there are any, with left-aligned and right-aligned columns."""
    if rows:
        table = start_table(*left, *right, right=right)
        for row in rows:
            table.add_row(*cells(row))
        print_table(table)


def _milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.1f} ms"


def _mebibytes(n_bytes: float) -> str:
    """Format bytes as MiB."""
    return f"{n_bytes / 2**20:,.0f} MiB"


def _print_speed(rows: list[Row]) -> None:
    """Print times of the cases against the naive baseline and against a matrix product."""

    def cells(row: Row) -> list[str]:
        """Return the cells of a case: times, speedup with its bounds, ratio to matmul time, speedup of wall time."""
        cpu, most = row["cpu_seconds"], row["max_matmul_ratio"]
        ratio = f"{row['matmul_ratio']:.1f}" + (f" (at most {most:g})" if most else "")
        times = [_milliseconds(cpu["naive"]), _milliseconds(cpu["torchcaps"]), f"{row['speedup']:.1f}x"]
        bounds = [f"{row['min_speedup']:.2g}x", f"{row['target_speedup']:g}x"]
        return [row["title"], *times, *bounds, ratio, f"{row['wall_speedup']:.1f}x"]

    speed = _of_kind(rows, "speed")
    if speed:
        rate = speed[0]["matmul_rate"] / 1e9
        print(f"CPU time on one thread; a large matrix product does {rate:.0f}e9 multiply-adds per second:")
    columns = ("naive", "torchcaps", "speedup", "required", "target", "x matmul time", "speedup, 2 threads")
    _print_rows(speed, ("case",), columns, cells)


def _print_memory(rows: list[Row]) -> None:
    """Print peak memory of training steps against the naive baseline."""
    for row in _of_kind(rows, "memory"):
        ours = row["torchcaps"]
        text = f"{row['model']}, training step with batch size {row['batch_size']}: {_mebibytes(ours['step_bytes'])}"
        text += " above the model"
        if "naive" in row:
            ratio = row["naive"]["step_bytes"] / ours["step_bytes"]
            text += f", 1/{ratio:.1f} of the naive baseline's {_mebibytes(row['naive']['step_bytes'])}"
        print(f"{text}; {ours['process_bytes'] / 2**30:.2f} GiB for the whole process")


def _print_growth(rows: list[Row]) -> None:
    """Print the times of each layer by batch size and by number of iterations."""
    growth = _of_kind(rows, "growth")
    for layer in dict.fromkeys(row["layer"] for row in growth):
        for axis in ("batch_size", "iterations"):
            points = [row for row in growth if row["layer"] == layer and row["axis"] == axis]
            times = ", ".join(f"{row['value']}: {1e3 * row['seconds']:.1f}" for row in points)
            print(f"{layer}, ms by {axis}: {times}")


def _print_steps(rows: list[Row]) -> None:
    """Print the training steps of whole models by variant."""
    steps = _of_kind(rows, "step")
    if not steps:
        return
    native = steps[0]["native_bfloat16"] or "none, it is emulated"
    print(f"CPU time of a training step on one thread, ms (native bfloat16: {native}):")
    table = start_table("model", "batch", *steps[0]["cpu_seconds"], right=("batch", *steps[0]["cpu_seconds"]))
    for row in steps:
        table.add_row(row["model"], str(row["batch_size"]), *(f"{1e3 * s:,.0f}" for s in row["cpu_seconds"].values()))
    print_table(table)


def _print_iterations(rows: list[Row]) -> None:
    """Print the times per iteration of the routings."""

    def cells(row: Row) -> list[str]:
        pairs = [(row[f"{storage}_seconds"], row[f"{storage}_ratio"]) for storage in ("stored", "streamed")]
        return [row["routing"], *(text for s, ratio in pairs for text in (f"{1e3 * s:.2f} ms", f"{ratio:.2f}"))]

    columns = ("stored votes", f"/ {REFERENCE}", "streamed votes", f"/ {REFERENCE} ")
    _print_rows(_of_kind(rows, "iteration"), ("routing",), columns, cells)


def _print_estimates(rows: list[Row]) -> None:
    """Print estimated against measured peak memory of training steps."""

    def cells(row: Row) -> list[str]:
        sizes = (row["vote_bytes"], row["estimated_bytes"], row["measured_bytes"])
        return [row["case"].replace(":", ", "), *map(_mebibytes, sizes), f"{row['ratio']:.2f}"]

    columns = ("all votes", "estimated", "measured", "estimated / measured")
    _print_rows(_of_kind(rows, "estimate"), ("model, batch size, votes",), columns, cells)


def _print_data(rows: list[Row]) -> None:
    """Print times of data loading against those of a training step."""

    def cells(row: Row) -> list[str]:
        times = [_milliseconds(row["batch_seconds"]), f"{row['step_seconds']:.2f} s"]
        return [row["case"], row["model"], *times, f"{100 * row['fraction']:.2f} %"]

    columns = ("loading a batch", "training step", "fraction")
    _print_rows(_of_kind(rows, "data"), ("data, pipeline", "model"), columns, cells)
    for row in _of_kind(rows, "data-total"):
        print(f"MNIST from gzipped files: {row['mnist_read_seconds']:.2f} s, {row['mnist_bytes'] / 1e6:.0f} MB")
        print(f"MultiMNIST: {row['multimnist_images_per_second']:,.0f} images per second")


def _print_explorer(rows: list[Row]) -> None:
    """Print the times of requests of the explorer."""
    columns = ("forward and trace", "with JSON", "decode 176 images")

    def cells(row: Row) -> list[str]:
        return [row["model"], *(_milliseconds(row[f"{name}_seconds"]) for name in ("trace", "reply", "decode"))]

    _print_rows(_of_kind(rows, "explorer"), ("model",), columns, cells)


def _print_training(rows: list[Row]) -> None:
    """Print overhead of the training loop, times by number of processes, and start-up times."""

    def loop_cells(row: Row) -> list[str]:
        overhead = [_milliseconds(row["overhead_seconds"]), f"{100 * row['overhead_fraction']:.2f} %"]
        return [row["model"], str(row["batch_size"]), f"{row['step_seconds']:.3f} s", *overhead]

    def process_cells(row: Row) -> list[str]:
        counts = [str(row["processes"]), str(row["threads"]), f"{row['step_seconds']:.3f} s"]
        return [row["model"], *counts, f"{row['images_per_second']:,.0f}", f"{100 * row['efficiency']:.0f} %"]

    columns = ("batch size", "arithmetic per step", "overhead per step", "fraction")
    _print_rows(_of_kind(rows, "loop"), ("model",), columns, loop_cells)
    columns = ("processes", "threads each", "step", "images/s", "efficiency")
    _print_rows(_of_kind(rows, "processes"), ("model",), columns, process_cells)
    for row in _of_kind(rows, "startup"):
        print(f"{row['command']}: {row['seconds']:.2f} s")


def _print_images(rows: list[Row]) -> None:
    """Print the test accuracies of both models by seed, and their means."""
    images = _of_kind(rows, "images")

    def cells(row: Row) -> list[str]:
        numbers = [f"{row['seed']}", f"{100 * row['accuracy']:.2f} %", f"{row['epochs']:.1f}"]
        return [f"{row['case']}, {row['model']}", *numbers, f"{row['training_seconds']:.1f} s"]

    _print_rows(images, ("case, model",), ("seed", "accuracy", "epochs", "CPU time"), cells)
    for name, model in dict.fromkeys((row["case"], row["model"]) for row in images):
        values = [row["accuracy"] for row in images if (row["case"], row["model"]) == (name, model)]
        print(f"{name}, {model}: mean accuracy {100 * sum(values) / len(values):.2f} %")


def _print_thresholds(rows: list[Row]) -> None:
    """Print the times of both alternatives of each threshold by size, then the crossovers next to the thresholds."""

    def point_cells(point: Row) -> list[str]:
        first, second = point["seconds"].items()
        times = [text for name, seconds in (first, second) for text in (name, f"{1e3 * seconds:.2f} ms")]
        return [f"{point['at']:,}", *times, f"{point['ratio']:.2f}"]

    def cells(row: Row) -> list[str]:
        return [row["threshold"], f"{row['value']:,}", _describe_result(row), row["unit"]]

    thresholds = _of_kind(rows, "threshold")
    for row in thresholds:
        print(f"{row['threshold']} = {row['value']:,} {row['unit']}; {row['title']}; {row['clock']}:")
        columns = ("size", "first", "time", "second", "time ", "ratio")
        _print_rows(row["points"], (), columns, point_cells)
    _print_rows(thresholds, ("threshold",), ("value", "measured", "unit"), cells)


def _describe_result(row: Row) -> str:
    """Return the crossover, or the fastest size, of a threshold."""
    if "optimum" in row:
        return f"fastest {row['optimum']:,} ({row['optimum_ratio']:.2f} of the time)"
    if row["crossover"] is not None:
        return f"crossover {row['crossover']:,.0f}"
    points = row["points"]
    return f"crossover below {points[0]['at']:,}" if points[0]["ratio"] > 1 else f"crossover above {points[-1]['at']:,}"
