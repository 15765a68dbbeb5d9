"""A run on the command line: its processes, its errors, and the summary at its end."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torchcaps.cli.console import print_table, start_table
from torchcaps.data import DataError
from torchcaps.training.distributed import (
    exit_with_launcher,
    launch_workers,
    num_processes,
    process_rank,
    report_to_launcher,
)
from torchcaps.training.errors import RunError, RunInterrupted
from torchcaps.training.logging import STOP_DESCRIPTIONS

__all__ = ["leave_safely", "run_safely", "share"]


def run_safely(words: list[str], devices: int, run: Callable[[], Any]) -> None:
    """Run in this process, or in as many as were asked for, and say how it went."""
    if devices > 1 and num_processes() == 1:
        sys.exit(launch_workers(["train", *words], devices))
    first = process_rank() == 0
    exit_with_launcher()
    warnings.showwarning = lambda message, *_: print(f"torchcaps: {message}", file=sys.stderr) if first else None
    try:
        result = run()
    except RunInterrupted as stopped:
        _leave(str(stopped), 128 + stopped.signal, first)
    except RunError as error:
        _leave(str(error), 1, not report_to_launcher(error))
    except (ValueError, TypeError, DataError) as error:
        # Once on every machine.
        _leave(str(error), 2, not report_to_launcher(error) and os.environ.get("LOCAL_RANK", "0") == "0")
    except KeyboardInterrupt:
        _leave("stopped at once; what was saved before stays", 130, first)
    if first:
        _summary(result)
    if num_processes() > 1:  # see Engine.close
        sys.stdout.flush()
        os._exit(0)


def leave_safely(work: Callable[[], object]) -> None:
    """Work in this process; where that does not come to its end, say why in one sentence and leave with its code."""
    warnings.showwarning = lambda message, *_: print(f"torchcaps: {message}", file=sys.stderr)
    try:
        work()
    except RunInterrupted as stopped:
        _leave(f"{stopped}; or the same command again", 128 + stopped.signal, True)
    except RunError as error:
        _leave(str(error), 1, True)
    except (ValueError, TypeError, DataError) as error:
        _leave(str(error), 2, True)
    except KeyboardInterrupt:
        _leave("stopped at once; what was saved before stays: the same command goes on", 130, True)


def _leave(message: str, code: int, speak: bool) -> NoReturn:
    if speak:
        print(f"torchcaps: {message}", file=sys.stderr, flush=True)
    if num_processes() > 1:  # other processes must not wait for this one: no tidying up that could hang
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def share(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.2f} %"


def _summary(result: Any) -> None:
    minutes = f"{result.seconds / 60:.1f} minutes" if result.seconds >= 60 else f"{result.seconds:.0f} seconds"
    reason = STOP_DESCRIPTIONS[result.stop_reason]
    print(f"\nDone: {reason}, after {result.epochs:.4g} epochs ({result.steps:,} steps) in {minutes}.\n")
    if result.test_results:
        table = start_table("weights", "right", "95 % interval", "wrong", "loss", right=("right", "wrong", "loss"))
        for kind, found in result.test_results.items():
            low, high = found.interval
            between = f"{100 * low:.2f} to {100 * high:.2f} %"
            wrong = f"{found.n - found.n_right:,} of {found.n:,}"
            mark = f"{kind} *" if len(result.test_results) > 1 and kind == result.eval_weights else kind
            table.add_row(mark, share(found.accuracy), between, wrong, f"{found.loss:.4f}")
        print("On the test images, by which nothing was chosen:")
        print_table(table)
    print(f"{result.path}/")
    for path, what in (
        ("config.yaml", "everything that decides the run"),
        ("metrics.csv", "its curve"),
        ("results.json", "these numbers, by class, with the machine"),
        ("checkpoints/", "the last weights, and the best where images were held out"),
        ("figures/", ", ".join(sorted(path.stem for path in (result.path / "figures").glob("*.png")))),
    ):
        print(f"  {path:<14} {what}")
    print(f"\nGo on: torchcaps predict {result.path} IMAGE.png, or torchcaps evaluate {result.path}")
