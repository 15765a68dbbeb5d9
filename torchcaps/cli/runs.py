"""Training in a command: launch of several processes, errors as exit codes, and the summary at the end."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from torchcaps.cli.command_line import TRUST_FLAG
from torchcaps.cli.console import ExitCode, escape_control, percent, print_table, start_table
from torchcaps.data import DataError
from torchcaps.training import TrainResult
from torchcaps.training.distributed import (
    exit_with_launcher,
    launch_workers,
    num_processes,
    process_rank,
    report_to_launcher,
)
from torchcaps.training.errors import RunError, RunInterrupted
from torchcaps.training.logging import STOP_DESCRIPTIONS

__all__ = ["exit_on_error", "run_training"]


def run_training(arguments: list[str], devices: int, run: Callable[[], TrainResult]) -> None:
    """Run a training and print its summary; exit with an `ExitCode` if it fails.

    Args:
        arguments: arguments of ``torchcaps train``, for worker processes.
        devices: number of processes; if more than one, this process only launches and supervises the workers.
        run: trains and returns the result.
    """
    if devices > 1 and num_processes() == 1:
        sys.exit(launch_workers(["train", *arguments], devices))
    is_main = process_rank() == 0
    exit_with_launcher()
    warnings.showwarning = lambda message, *_: print(f"torchcaps: {message}", file=sys.stderr) if is_main else None
    try:
        result = run()
    except RunInterrupted as interrupted:
        _exit(str(interrupted), ExitCode.SIGNAL + interrupted.signal, is_main)
    except RunError as error:
        _exit(str(error), ExitCode.FAILURE, not report_to_launcher(error))
    except (ValueError, TypeError, DataError) as error:
        is_first_on_machine = os.environ.get("LOCAL_RANK", "0") == "0"
        _exit(str(error), ExitCode.USAGE, not report_to_launcher(error) and is_first_on_machine)
    except KeyboardInterrupt:
        _exit("interrupted; checkpoints saved before are intact", ExitCode.INTERRUPTED, is_main)
    except Exception as error:  # unexpected
        if num_processes() == 1:
            raise
        traceback.print_exc()
        report_to_launcher(RunError(f"unexpected {type(error).__name__} in process {process_rank()}: {error}"))
        _exit("", ExitCode.FAILURE, False)
    if is_main:
        _print_summary(result)
    if num_processes() > 1:  # see Engine.close
        sys.stdout.flush()
        os._exit(ExitCode.OK)


def exit_on_error(work: Callable[[], object]) -> None:
    """Call a function in this process; if it raises, print one line and exit with an `ExitCode`."""
    warnings.showwarning = lambda message, *_: print(f"torchcaps: {message}", file=sys.stderr)
    try:
        work()
    except RunInterrupted as interrupted:
        _exit(f"{interrupted}, or repeat this command", ExitCode.SIGNAL + interrupted.signal, True)
    except RunError as error:
        _exit(str(error), ExitCode.FAILURE, True)
    except (ValueError, TypeError, DataError) as error:
        _exit(str(error), ExitCode.USAGE, True)
    except KeyboardInterrupt:
        _exit("interrupted; repeat the command to continue from what was saved", ExitCode.INTERRUPTED, True)


def _exit(message: str, code: int, print_message: bool) -> NoReturn:
    if print_message:
        print(f"torchcaps: {escape_control(message)}", file=sys.stderr, flush=True)
    if num_processes() > 1:  # no clean-up that could wait for the other processes
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _print_summary(result: TrainResult) -> None:
    """Print stop reason, test results and files of a finished run."""
    minutes = f"{result.seconds / 60:.1f} minutes" if result.seconds >= 60 else f"{result.seconds:.0f} seconds"
    reason = STOP_DESCRIPTIONS[result.stop_reason]
    print(f"\nFinished: {reason}, after {result.epochs:.4g} epochs ({result.steps:,} steps) in {minutes}.\n")
    if result.test_results:
        numeric = ("accuracy", "incorrect", "loss")
        table = start_table("weights", "accuracy", "95 % interval", "incorrect", "loss", right=numeric)
        for weights, evaluation in result.test_results.items():
            low, high = evaluation.interval
            interval = f"{100 * low:.2f} to {100 * high:.2f} %"
            incorrect = f"{evaluation.n - evaluation.n_correct:,} of {evaluation.n:,}"
            mark = " *" if len(result.test_results) > 1 and weights == result.eval_weights else ""
            cells = (percent(evaluation.accuracy), interval, incorrect, f"{evaluation.loss:.4f}")
            table.add_row(f"{weights}{mark}", *cells)
        print("Test set (not used for any choice):")
        print_table(table)
    figures = sorted(path.stem for path in (result.path / "figures").glob("*.png"))
    print(f"{result.path}/")
    for path, content in {
        "config.yaml": "all settings of the run",
        "metrics.csv": "learning curves",
        "results.json": "test results, per class, and the machine",
        "checkpoints/": "last weights; best weights, if there is a validation set",
        "figures/": ", ".join(figures),
    }.items():
        print(f"  {path:<14} {content}")
    trust = f" {TRUST_FLAG}" if result.names_own_code else ""
    print(f"\nNext: torchcaps predict {result.path} IMAGE.png{trust}, or torchcaps evaluate {result.path}{trust}")
