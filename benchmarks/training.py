"""What training costs beside its arithmetic: the loop's own share, one process and two, and the time to a help text.

python -m benchmarks.training --repeat 2
python -m benchmarks.training help loop        # these parts only; the others stay in the record as they are

The loop's share is measured inside a run, on one thread, in CPU time: all of a step but the forward pass, the loss, the
backward pass and the optimiser's step, and the writing of a checkpoint and a row at the end of each epoch, in seconds
on the clock, divided by the epoch's steps. Looks at images held out, which are forward passes, are left out. Processes
share the batch of one; each has one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from torchcaps.bench.record import write_record
from torchcaps.training import RunSpec
from torchcaps.training.distributed import Engine
from torchcaps.training.logging import ConsoleLogger, MetricsLog
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import build_network, open_data
from torchcaps.training.stopping import Timer
from torchcaps.training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("help", "loop", "processes")
CASES = {"sabour2017_mnist": 6, "capsnet_small": 30}  # and for how many steps
# a model, and two lengths of run whose difference is timed
SCALED = {"sabour2017_mnist": (2, 10), "capsnet_small": (10, 110)}


class Stopwatch:
    """Adds up the CPU time of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


def loop_share(name: str, steps: int) -> dict[str, Any]:
    """Train for some steps, and tell what of it was not arithmetic."""
    spec = RunSpec.of(name, data="digits", num_threads=1, val_fraction=0.0)
    images = open_data(spec)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as place, RunDirectory.create(Path(place) / "run", "run") as folder:
        training = Trainer(spec, folder, Engine(spec), images, build_network(spec), ConsoleLogger(False))
        training.metrics = MetricsLog(folder.metrics, 0)
        training.timer = Timer(time.monotonic)
        training.network.forward = watch.around(training.network.forward)  # type: ignore[method-assign]
        training.loss.forward = watch.around(training.loss.forward)
        training.optimizer.optimizer.step = watch.around(training.optimizer.optimizer.step)
        backward = torch.Tensor.backward
        torch.Tensor.backward = watch.around(backward)  # type: ignore[method-assign]
        try:
            batches = training.loader.epoch(0)
            training._train_step(next(batches))  # the first makes buffers
            watch.seconds, start = 0.0, time.process_time()
            for _ in range(steps):
                training._is_finished()
                training._train_step(next(batches))
                training._save_or_stop_if_due()
            whole = time.process_time() - start
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
        start = time.perf_counter()
        training._log_metrics(evaluate=False)
        training._save()
        end = (time.perf_counter() - start) / training.batches_per_epoch
        training.metrics.close()
    own = (whole - watch.seconds) / steps + end
    return {
        "kind": "loop",
        "model": name,
        "batch": spec.recipe.batch_size,
        "step_seconds": watch.seconds / steps,
        "own_seconds": own,
        "share": own * steps / watch.seconds,
    }


def timed_run(name: str, steps: int, processes: int, threads: int) -> float:
    """Return the seconds on the clock that a run of so many steps trained for."""
    with tempfile.TemporaryDirectory() as place:
        words = [
            "train",
            name,
            "--data",
            "digits",
            "--steps",
            str(steps),
            "--val-fraction",
            "0",
            "--max-test-images",
            "100",
        ]
        words += ["--num-threads", str(threads), "--devices", str(processes), "--out", f"{place}/run"]
        command = [sys.executable, "-m", "torchcaps", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
        return float(json.loads((Path(place) / "run/results.json").read_text())["seconds"])


def scaling(name: str, repeat: int) -> list[dict[str, Any]]:
    """Compare one process, one with two threads, and two processes: the same batches, interleaved, the least."""
    few, many = SCALED[name]
    ways = {(1, 1): float("inf"), (1, 2): float("inf"), (2, 1): float("inf")}
    for _ in range(repeat):
        for processes, threads in ways:
            seconds = timed_run(name, many, processes, threads) - timed_run(name, few, processes, threads)
            ways[processes, threads] = min(ways[processes, threads], seconds / (many - few))
    alone = ways[1, 1]
    batch = RunSpec(name).recipe.batch_size
    return [
        {
            "kind": "processes",
            "model": name,
            "processes": processes,
            "threads": threads,
            "step_seconds": seconds,
            "images_per_second": batch / seconds,
            "efficiency": alone / seconds / (processes * threads),
        }
        for (processes, threads), seconds in ways.items()
    ]


def help_seconds(words: list[str], repeat: int) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "torchcaps"), *words]
    least = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        least = min(least, time.perf_counter() - start)
    return {"kind": "help", "command": " ".join(["torchcaps", *words]), "seconds": least}


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(width=100)
    table = Table("model", "batch", "a step", "the loop's own", "share", box=box.SIMPLE_HEAD)
    for row in (row for row in rows if row["kind"] == "loop"):
        own, share = f"{1000 * row['own_seconds']:.1f} ms", f"{100 * row['share']:.2f} %"
        table.add_row(row["model"], str(row["batch"]), f"{row['step_seconds']:.3f} s", own, share)
    console.print(table)
    table = Table("model", "processes", "threads of each", "a step", "images/s", "efficiency", box=box.SIMPLE_HEAD)
    for row in (row for row in rows if row["kind"] == "processes"):
        cells = (f"{row['step_seconds']:.3f} s", f"{row['images_per_second']:,.0f}", f"{100 * row['efficiency']:.0f} %")
        table.add_row(row["model"], str(row["processes"]), str(row["threads"]), *cells)
    console.print(table)
    for row in (row for row in rows if row["kind"] == "help"):
        console.print(f"{row['command']}: {row['seconds']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2, help="passes over the processes, interleaved (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/bench/training.json", help="where it is recorded")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if set(parts) - set(PARTS):
        parser.error(f"there is no part {sorted(set(parts) - set(PARTS))[0]!r}: there are {', '.join(PARTS)}")
    stages: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    if "help" in parts:
        stages += [(help_seconds, (words, 5)) for words in (["--help"], ["train", "--help"])]
    if "loop" in parts:
        stages += [(loop_share, case) for case in CASES.items()]
    if "processes" in parts:
        stages += [(scaling, (name, arguments.repeat)) for name in SCALED]
    rows = []
    for function, given in track(stages, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        found = function(*given)
        rows += found if isinstance(found, list) else [found]
    if set(parts) != set(PARTS) and arguments.out.exists():
        rows = [row for row in json.loads(arguments.out.read_text())["rows"] if row["kind"] not in parts] + rows
    show(rows)
    torch.set_num_threads(1)
    write_record(arguments.out, "benchmarks.training", rows)


if __name__ == "__main__":
    main()
