"""What a person sees of a run: a bar on a terminal, plain lines in pipes and files."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from torchcaps._core.optional import import_optional
from torchcaps.training.evaluation import Tally

__all__ = ["Display"]

QUIET = 60.0  # seconds between two lines of a pipe inside an epoch
DRAWN = 0.2  # seconds between two changes of the bar


class Display:
    """Shows a run.

    Args:
        speak: whether this process is the one that speaks.
    """

    def __init__(self, speak: bool = True) -> None:
        self.speak = speak
        self.terminal = speak and sys.stdout.isatty()
        self._bar: Any = None
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self.speak:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except BrokenPipeError:  # whoever read has gone: no reason to end a run of hours
            self.speak = False
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open to the end

    @contextlib.contextmanager
    def running(self, total: int, done: int) -> Iterator[None]:
        """Show the bar, where somebody looks, while a run goes on."""
        if not self.terminal:
            yield
            return
        rich = import_optional("rich.progress", "the progress bar")
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=None),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[numbers]}"),
            rich.TimeRemainingColumn(compact=True),
        )
        self._bar = rich.Progress(*columns, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("training", total=total, completed=done, numbers="")
        with self._bar:
            try:
                yield
            finally:
                self._bar.stop()
                self._bar = None

    def step(self, step: int, epoch: float, total: int, tally: Tally) -> None:
        """Show a step."""
        if not self.speak:
            return
        now = time.monotonic()
        if now - self._last < (DRAWN if self._bar is not None else QUIET):
            return
        self._last = now
        n = max(1, int(tally.counts[0]))
        loss, accuracy = float(tally.loss) / n, 100 * int(tally.counts[1]) / n
        numbers = f"loss {loss:.4f}  {accuracy:.1f} %"
        if self._bar is not None:
            words = f"epoch {int(epoch - 1e-9) + 1}"
            self._bar.update(self._task, description=words, completed=step, total=total, numbers=numbers)
        else:
            self.say(f"epoch {epoch:.2f}  step {step:,} of {total:,}  {numbers}")

    def tick(self) -> None:
        """Take note that a look at other images goes on."""
        if self._bar is not None and time.monotonic() - self._last > DRAWN:
            self._last = time.monotonic()
            self._bar.update(self._task, description="evaluating")

    def row(self, row: dict[str, Any], epochs: int | None) -> None:
        """Show what an epoch has brought."""
        number = f"{row['epoch']:g}" + (f"/{epochs}" if epochs else "")
        words = [f"epoch {number:>6}", f"{row['seconds']:6,.0f} s"]
        for name in ("train", "validation", "test"):
            if row.get(f"{name}_accuracy") is not None:
                words.append(f"{name} {100 * row[f'{name}_accuracy']:.2f} %, loss {row[f'{name}_loss']:.4f}")
        self.say("  ".join(words))
        self._last = time.monotonic()
