"""Logging of a run: metrics as CSV and for TensorBoard, progress and summaries on the console."""

import contextlib
import csv
import datetime
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torchcaps._core.files import check_regular_file, reason_of, write_atomic
from torchcaps._core.optional import import_optional
from torchcaps._core.validation import escape_control
from torchcaps.models import Network
from torchcaps.profiling.memory import estimate_memory
from torchcaps.training.config import RunSpec
from torchcaps.training.distributed import num_processes
from torchcaps.training.errors import RunError
from torchcaps.training.evaluation import RunningEvaluation
from torchcaps.training.setup import RunData
from torchcaps.training.state import StopReason

__all__ = [
    "COLUMNS",
    "STOP_DESCRIPTIONS",
    "ConsoleLogger",
    "Expectation",
    "MetricsLog",
    "describe_run",
    "read_metrics",
]

COLUMNS: tuple[str, ...] = (
    "epoch",  # 0.5 in the middle of the first
    "step",
    "seconds",
    "lr",
    "train_loss",
    "train_accuracy",
    "grad_norm",
    "val_loss",
    "val_accuracy",
    "test_loss",
    "test_accuracy",
)
STOP_DESCRIPTIONS = {
    StopReason.MAX_EPOCHS: "completed all epochs",
    StopReason.MAX_STEPS: "completed all steps",
    StopReason.MAX_MINUTES: "reached max_minutes",
    StopReason.EARLY_STOPPING: "early stopping, no improvement in early_stopping_patience evaluations",
    StopReason.TARGET_ACCURACY: "reached target_accuracy on the validation set",
    StopReason.INTERRUPTED: "interrupted by a signal",
    StopReason.DIVERGED: "diverged",
}
LINE_INTERVAL_S = 60.0  # between two progress lines inside an epoch, without a terminal
UNLIMITED_EPOCHS = 100_000  # from here on, epochs only express that the time is the limit
MAX_METRICS_BYTES = 2**26  # of metrics.csv: about 500,000 rows
BAR_INTERVAL_S = 0.2  # between two updates of the progress bar


# Metrics -------------------------------------------------------------------------------------------------------


class MetricsLog:
    """Writer of ``metrics.csv``, and of TensorBoard files if enabled.

    Args:
        path: the CSV file.
        step: the step that training continues from; later rows, which will be written again, are removed.
        tensorboard: directory for TensorBoard files, or ``None``.
    """

    def __init__(self, path: Path, step: int, tensorboard: Path | None = None) -> None:
        self.path = path
        self.rows = [row for row in read_metrics(path) if row["step"] <= step]
        write_atomic(path, _to_csv(self.rows), RunError)
        self._writer: Any = None
        if tensorboard is not None:
            import_optional("tensorboard", "--tensorboard")
            summaries = import_optional("torch.utils.tensorboard", "--tensorboard")
            self._writer = summaries.SummaryWriter(tensorboard, purge_step=step + 1)

    def write(self, **values: float | int | None) -> None:
        """Append a row; columns without a value stay empty."""
        row = {column: values.get(column) for column in COLUMNS}
        self.rows.append(row)
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {reason_of(error)}") from error
        if self._writer is not None:
            for column, value in row.items():
                if value is not None and column not in ("epoch", "step", "seconds"):
                    self._writer.add_scalar(column.replace("_", "/", 1), value, row["step"])
            self._writer.flush()

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.csv``; damaged rows and an incomplete last line are skipped."""
    if not path.exists():
        return []
    try:
        check_regular_file(path, MAX_METRICS_BYTES)
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"{path} can't be read: {reason_of(error)}") from error
    rows = []
    try:
        lines = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    except csv.Error as error:  # such as a field of more than 128 KiB
        raise RunError(f"{path} can't be read: {error}") from error
    for row in lines:
        try:
            numbers = {name: float(row[name]) if row[name] else None for name in COLUMNS}
            rows.append({**numbers, "step": int(row["step"])})
        except (TypeError, ValueError, KeyError):
            continue
    return rows


def _to_csv(rows: list[dict[str, Any]]) -> str:
    """Return rows of metrics as CSV text with a header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# Console -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expectation:
    """Expected length of a run; with a time limit, what fits into it at the present speed.

    Args:
        steps: number of steps of the whole run.
        epochs: number of epochs of the whole run; ``None`` if the speed that decides it is not known yet.
        seconds_left: estimated time until its end; ``None`` if unknown.
    """

    steps: int
    epochs: float | None
    seconds_left: float | None = None

    @property
    def of_epochs(self) -> str:
        """Number of epochs behind the current one, ``"/16"``; empty if it is unknown."""
        return "" if self.epochs is None else f"/{self.epochs:.4g}"


def _escape_lines(text: str) -> str:
    """Return lines with control characters escaped: they can contain names of files and classes."""
    return "\n".join(map(escape_control, text.split("\n")))


class ConsoleLogger:
    """Progress of a run on standard output: a bar on a terminal, lines in pipes and files.

    Args:
        enabled: whether this process prints; only one of several does.
        stream: file to print to (default: standard output).
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled, self.stream = enabled, stream
        self.is_terminal = enabled and (stream or sys.stdout).isatty()
        self._bar: Any = None
        self._last_update = time.monotonic()

    def print(self, text: str) -> None:
        """Print lines, above the bar if there is one, with control characters escaped."""
        if not self.enabled:
            return
        text = _escape_lines(text)
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self.stream, flush=True)
        except BrokenPipeError:  # the reader has exited: training continues without output
            self.enabled = False
            if self.stream is None:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115, stays open until the process exits

    def warn(self, text: str) -> None:
        """Print a line also if the progress is not printed: on standard error, or above the bar."""
        if self.enabled:
            self.print(text)
        else:
            print(_escape_lines(text), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def progress(self, total: int, completed: int) -> Iterator[None]:
        """Context manager that shows the progress bar, if standard output is a terminal.

        Args:
            total: number of steps of the run.
            completed: steps done before.
        """
        if not self.is_terminal:
            yield
            return
        rich = import_optional("rich.progress", "the progress bar")
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=None),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[metrics]}"),
            rich.TimeRemainingColumn(compact=True),
        )
        console = import_optional("rich.console", "the progress bar").Console(file=self.stream)
        self._bar = rich.Progress(*columns, console=console, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("training", total=total, completed=completed, metrics="")
        with self._bar:
            try:
                yield
            finally:
                self._bar.stop()
                self._bar = None

    def on_step(self, step: int, epoch: float, expected: Expectation, train_metrics: RunningEvaluation) -> None:
        """Show the progress after a training step.

        Args:
            step: completed steps.
            epoch: progress in epochs.
            expected: length of the run.
            train_metrics: loss and accuracy since the last row.
        """
        if not self.enabled:
            return
        now = time.monotonic()
        if now - self._last_update < (BAR_INTERVAL_S if self._bar is not None else LINE_INTERVAL_S):
            return
        self._last_update = now
        n = max(1, int(train_metrics.counts[0]))
        metrics = f"loss {float(train_metrics.loss) / n:.4f}  accuracy {100 * int(train_metrics.counts[1]) / n:.1f} %"
        if self._bar is not None:
            total = "" if expected.epochs is None else f"/{math.ceil(expected.epochs - 1e-9)}"
            description = f"epoch {int(epoch - 1e-9) + 1}{total}"
            self._bar.update(self._task, description=description, completed=step, total=expected.steps, metrics=metrics)
        else:
            eta = _eta_text(expected.seconds_left)
            self.print(f"epoch {epoch:.2f}{expected.of_epochs}  step {step:,} of {expected.steps:,}  {metrics}{eta}")

    def on_eval_batch(self) -> None:
        """Show that an evaluation is running."""
        if self._bar is not None and time.monotonic() - self._last_update > BAR_INTERVAL_S:
            self._last_update = time.monotonic()
            self._bar.update(self._task, description="evaluating")

    def on_metrics(self, row: dict[str, Any], expected: Expectation) -> None:
        """Print a row of the metrics.

        Args:
            row: values by column.
            expected: length of the run.
        """
        epoch = f"{row['epoch']:.4g}{expected.of_epochs}"
        parts = [f"epoch {epoch:>6}", f"{row['seconds']:6,.0f} s"]
        for split in ("train", "val", "test"):
            if row.get(f"{split}_accuracy") is not None:
                accuracy, loss = row[f"{split}_accuracy"], row[f"{split}_loss"]
                parts.append(f"{split} accuracy {100 * accuracy:.2f} %, loss {loss:.4f}")
        self.print("  ".join(parts) + _eta_text(expected.seconds_left))
        self._last_update = time.monotonic()


def _eta_text(seconds: float | None) -> str:
    """Return the time left, ``"  ETA 1:02:03"``; an empty string if it is unknown.

    >>> _eta_text(3723.2), _eta_text(None)
    ('  ETA 1:02:03', '')
    """
    return "" if seconds is None else f"  ETA {datetime.timedelta(seconds=round(seconds))}"


def describe_run(spec: RunSpec, network: Network, data: RunData, out: Path) -> Iterator[str]:
    """Yield the lines printed before training: model, data, recipe, memory, and warnings.

    Args:
        spec: the settings.
        network: the model.
        data: its data sets.
        out: the run directory, which may not exist yet.
    """
    recipe = spec.recipe
    size = "x".join(map(str, network.spec.image))
    yield f"{spec.model}: {network.n_parameters:,} parameters, images of {size}, {network.spec.classes} classes"
    yield f"{data.train.name}: {_describe_splits(data, bool(recipe.test_data))}"
    if data.train.note:
        yield f"{data.train.name}: {data.train.note}"
    for dataset, split in ((data.val, "validation"), (data.test, "test")):
        labels = getattr(dataset, "labels", None)
        if dataset is None or labels is None:
            continue
        missing = [name for index, name in enumerate(dataset.classes) if not bool((labels == index).any())]
        if missing:
            more = ", ..." if len(missing) > 5 else ""
            yield f"warning: the {split} set has no images of {', '.join(missing[:5])}{more}"
    duration = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs:,} epochs"
    if spec.max_minutes is not None:
        minutes = f"{spec.max_minutes:.3g} minutes"
        is_unlimited = recipe.epochs is not None and recipe.epochs >= UNLIMITED_EPOCHS
        duration = minutes if is_unlimited else f"{duration}, at most {minutes}"
    optimizer = f"{recipe.optimizer.name}, learning rate {recipe.optimizer.lr:g}, {type(recipe.lr_schedule).__name__}"
    yield f"{recipe.loss.name.replace('_', '-')} loss, {optimizer}, batch size {recipe.batch_size}, {duration}"
    needed = estimate_memory(network, -(-recipe.batch_size // (spec.micro_batches * num_processes()))).total
    available = _available_memory()
    yield f"memory: about {_gib(needed)} for training" + (f", {_gib(available)} available" if available else "")
    on_disk = 3 * 4 * network.n_parameters * (1 + recipe.optimizer.n_states)  # up to three checkpoints
    free = shutil.disk_usage(_existing_parent(out)).free
    if free < on_disk:
        yield f"warning: checkpoints need up to {_gib(on_disk)}, and the disk has {_gib(free)} left"
    if available and needed > available:
        yield "warning: this may run out of memory; reduce --batch-size or use --micro-batches 4"


def _describe_splits(data: RunData, other_test_set: bool) -> str:
    """Return the number of images of each split as text, with the name of the test set if it is another one."""
    counts = [f"{len(data.train):,} training images"]
    if data.val is not None:
        counts.append(f"{len(data.val):,} validation images")
    if data.test is not None:
        counts.append(f"{len(data.test):,} test images" + (f" ({data.test.name})" if other_test_set else ""))
    return ", ".join(counts)


def _existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.expanduser().resolve()
    return path if path.exists() else _existing_parent(path.parent)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _available_memory() -> int | None:
    """Return the bytes of memory available on this machine, if the system reports it (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
