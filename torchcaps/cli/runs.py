"""Training in a command: launch of several processes, errors as exit codes, and the summary at the end."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from torchcaps.bench.images import train_baseline
from torchcaps.cli.command_line import TRUST_FLAG
from torchcaps.cli.console import (
    ExitCode,
    escape_control,
    exit_code_of,
    percent,
    print_table,
    print_text,
    print_warning,
    start_table,
)
from torchcaps.data import DataError
from torchcaps.training import TrainResult
from torchcaps.training.config import RunSpec
from torchcaps.training.distributed import (
    check_device,
    exit_with_launcher,
    launch_workers,
    num_processes,
    process_rank,
    report_to_launcher,
)
from torchcaps.training.errors import RunError, RunInterrupted
from torchcaps.training.logging import STOP_DESCRIPTIONS, ConsoleLogger

__all__ = ["OutputMode", "exit_on_error", "run_training"]


@dataclass(frozen=True)
class OutputMode:
    """Output of ``torchcaps train``.

    Args:
        quiet: print no progress.
        json: print the results as JSON on standard output, and the progress on standard error.
    """

    quiet: bool = False
    json: bool = False

    def console(self, is_main: bool) -> ConsoleLogger:
        """Return the logger of a process."""
        return ConsoleLogger(is_main and not self.quiet, sys.stderr if self.json else None)


def run_training(
    arguments: list[str],
    spec: RunSpec,
    run: Callable[[ConsoleLogger], TrainResult],
    output: OutputMode,
    baseline: str | None = None,
) -> None:
    """Run a training and print its summary; exit with an `ExitCode` if it fails.

    Args:
        arguments: arguments of ``torchcaps train``, for worker processes.
        spec: settings of the run. With several devices, this process only launches and supervises the workers.
        run: trains with a console and returns the result.
        output: what is printed.
        baseline: name of a baseline that is trained afterwards, see `torchcaps.bench.images.baseline_spec`.
    """
    check_device(spec.device, spec.devices)  # before anything is prepared
    if spec.devices > 1 and num_processes() == 1:
        sys.exit(launch_workers(["train", *arguments], spec.devices))
    is_main = process_rank() == 0
    exit_with_launcher()
    warnings.showwarning = print_warning if is_main else lambda *_: None
    compared = None
    try:
        result = run(output.console(is_main))
        if baseline is not None:
            compared = train_baseline(result, output.console(is_main))
    except RunInterrupted as interrupted:
        _exit(str(interrupted), ExitCode.SIGNAL + interrupted.signal, is_main)
    except RunError as error:
        _exit(str(error), ExitCode.FAILURE, not report_to_launcher(error))
    except (ValueError, TypeError, DataError) as error:
        is_first_on_machine = os.environ.get("LOCAL_RANK", "0") == "0"
        _exit(str(error), exit_code_of(error), not report_to_launcher(error) and is_first_on_machine)
    except KeyboardInterrupt:
        _exit("interrupted; checkpoints saved before are intact", ExitCode.INTERRUPTED, is_main)
    except Exception as error:  # unexpected, unless the memory is exhausted
        if _is_out_of_memory(error):
            reason = " ".join(str(error).split())
            lost = RunError(
                f"not enough memory: choose a smaller model, --batch-size, or more --micro-batches ({reason})"
            )
            _exit(str(lost), ExitCode.FAILURE, not report_to_launcher(lost))
        if num_processes() == 1:
            raise
        traceback.print_exc()
        report_to_launcher(RunError(f"unexpected {type(error).__name__} in process {process_rank()}: {error}"))
        _exit("", ExitCode.FAILURE, False)
    if is_main and output.json:
        print(json.dumps({**_to_json(result), "compared": None if compared is None else _to_json(compared)}, indent=2))
    elif is_main:
        _print_summary(result, compared)
    if num_processes() > 1:  # see Engine.close
        sys.stdout.flush()
        os._exit(ExitCode.OK)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory could not be allocated; torch has no exception type for that of the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def exit_on_error(work: Callable[[], object]) -> None:
    """Call a function in this process; if it raises, print one line and exit with an `ExitCode`."""
    warnings.showwarning = print_warning
    try:
        work()
    except RunInterrupted as interrupted:
        _exit(f"{interrupted}, or repeat this command", ExitCode.SIGNAL + interrupted.signal, True)
    except RunError as error:
        _exit(str(error), ExitCode.FAILURE, True)
    except (ValueError, TypeError, DataError) as error:
        _exit(str(error), exit_code_of(error), True)
    except KeyboardInterrupt:
        _exit("interrupted; repeat the command to continue from what was saved", ExitCode.INTERRUPTED, True)


def _exit(message: str, code: int, print_message: bool) -> NoReturn:
    """Print a message on stderr, if ``print_message``, and exit; without clean-up if there are several processes."""
    if print_message:
        print(f"torchcaps: {escape_control(message)}", file=sys.stderr, flush=True)
    if num_processes() > 1:  # no clean-up that could wait for the other processes
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _to_json(result: TrainResult) -> dict[str, Any]:
    """Return the content of ``--json``: ``results.json`` of the run and its directory."""
    results = json.loads((result.path / "results.json").read_text())
    return {"path": str(result.path), **results}


def _print_summary(result: TrainResult, compared: TrainResult | None) -> None:
    """Print stop reason, test results and files of a finished run, next to those of a baseline if there is one."""
    minutes = f"{result.seconds / 60:.1f} minutes" if result.seconds >= 60 else f"{result.seconds:.0f} seconds"
    reason = STOP_DESCRIPTIONS[result.stop_reason]
    print()
    print_text(f"Finished: {reason}, after {result.epochs:.4g} epochs ({result.steps:,} steps) in {minutes}.")
    print()
    if result.test_results:
        _print_test_results(result)
    if compared is not None:
        _print_comparison(result, compared)
    figures = sorted(path.stem for path in (result.path / "figures").glob("*.png"))
    print(f"{result.path}/")
    for path, content in {
        "config.yaml": "all settings of the run",
        "metrics.csv": "learning curves",
        "results.json": "test results, per class, and the machine",
        "checkpoints/": "last weights; best weights, if there is a validation set",
        "figures/": ", ".join(figures),
    }.items():
        print_text(f"  {path:<14} {content}", " " * 17)
    trust = f" {TRUST_FLAG}" if result.names_own_code else ""
    print(f"\nNext: torchcaps predict {result.path} IMAGE.png{trust}\n      torchcaps evaluate {result.path}{trust}")


def _print_test_results(result: TrainResult) -> None:
    """Print a table with the test results of each kind of weights."""
    headings = ["weights", "accuracy", "95 % interval", "incorrect", "loss"]
    unbalanced = any(evaluation.is_unbalanced for evaluation in result.test_results.values())
    if unbalanced:
        headings.insert(2, "balanced")
    table = start_table(*headings, right=("accuracy", "balanced", "incorrect", "loss"))
    for weights, evaluation in result.test_results.items():
        low, high = evaluation.interval
        cells = {
            "accuracy": percent(evaluation.accuracy),
            "balanced": percent(evaluation.balanced_accuracy),
            "95 % interval": f"{100 * low:.2f} to {100 * high:.2f} %",
            "incorrect": f"{evaluation.n - evaluation.n_correct:,} of {evaluation.n:,}",
            "loss": f"{evaluation.loss:.4f}",
        }
        mark = " *" if len(result.test_results) > 1 and weights == result.eval_weights else ""
        table.add_row(f"{weights}{mark}", *(cells[heading] for heading in headings[1:]))
    print("Test set (not used for any choice):")
    print_table(table)
    if len(result.test_results) > 1:
        print_text("* the weights that predict and evaluate use unless --weights is given.")
        print()
    if unbalanced:
        print_text("balanced: mean of the accuracies per class, since the test set has more images of some classes.")
        print()


def _print_comparison(result: TrainResult, compared: TrainResult) -> None:
    """Print the test accuracy of a run next to that of a baseline with the same data and time."""
    numeric = ("accuracy", "balanced", "epochs", "seconds")
    headings = ["run", "accuracy", "95 % interval", "epochs", "seconds"]
    unbalanced = result.test is not None and result.test.is_unbalanced
    if unbalanced:
        headings.insert(2, "balanced")
    table = start_table(*headings, right=numeric)
    for each in (result, compared):
        cells = {"accuracy": "no test set"}
        if each.test is not None:
            low, high = each.test.interval
            cells = {"accuracy": percent(each.test.accuracy), "balanced": percent(each.test.balanced_accuracy)}
            cells["95 % interval"] = f"{100 * low:.2f} to {100 * high:.2f} %"
        cells |= {"run": each.path.name, "epochs": f"{each.epochs:.4g}", "seconds": f"{each.seconds:.0f}"}
        table.add_row(*(cells.get(heading, "") for heading in headings))
    print("Compared with the baseline, trained for the same time:")
    print_table(table)
