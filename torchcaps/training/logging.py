"""The numbers of a run, row by row: as CSV always, for TensorBoard where it is asked for."""

import csv
import io
from pathlib import Path
from typing import Any

from torchcaps._core.optional import import_optional
from torchcaps.training.errors import RunError
from torchcaps.training.run_dir import RunFolder

__all__ = ["COLUMNS", "Record", "read_rows"]

COLUMNS: tuple[str, ...] = (
    "epoch",  # epochs done, 0.5 in the middle of the first
    "step",
    "seconds",
    "rate",
    "train_loss",
    "train_accuracy",
    "gradient_norm",
    "validation_loss",
    "validation_accuracy",
    "test_loss",
    "test_accuracy",
)


class Record:
    """Writes the rows of a run.

    Args:
        folder: of the run.
        step: the step that the run goes on from; rows of later ones, which will come again, are left out.
        tensorboard: write them for TensorBoard too.
    """

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool) -> None:
        self.path = folder.metrics
        self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        folder.write_text(self.path, _text(self.rows))
        self._board: Any = None
        if tensorboard:
            import_optional("tensorboard", "--tensorboard")
            summaries = import_optional("torch.utils.tensorboard", "--tensorboard")
            self._board = summaries.SummaryWriter(folder.path / "tensorboard", purge_step=step + 1)

    def write(self, **values: float | int | None) -> None:
        """Add a row."""
        row = {column: values.get(column) for column in COLUMNS}
        self.rows.append(row)
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {error.strerror or error}") from error
        if self._board is not None:
            for column, value in row.items():
                if value is not None and column not in ("epoch", "step", "seconds"):
                    self._board.add_scalar(column.replace("_", "/", 1), value, row["step"])
            self._board.flush()

    def close(self) -> None:
        """Close what was opened."""
        if self._board is not None:
            self._board.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; a last line that was cut off in the middle is left out."""
    if not path.exists():
        return []
    rows = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # what is no row is left out below
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror or error}") from error
    whole = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(io.StringIO(whole)):
        try:
            numbers = {name: float(row[name]) if row[name] else None for name in COLUMNS}
            rows.append({**numbers, "step": int(row["step"])})
        except (TypeError, ValueError, KeyError):
            continue
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
