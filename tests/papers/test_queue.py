"""The queue: its entries exist, and are documented in their order."""

import re
from pathlib import Path

import pytest

from torchcaps.papers import find_item
from torchcaps.papers.queue import QUEUE, QueueEntry
from torchcaps.reproduce.planner import planned_keys
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Run

DOCUMENT = Path(__file__).parents[2] / "docs/reproduction.md"
ENTRIES = pytest.mark.parametrize("entry", QUEUE, ids=lambda entry: f"{entry.paper}-{entry.item}")


def documented(entry: QueueEntry, index: int) -> str:
    """Return the row of an entry in the table of the documentation."""
    part = "; ".join(", ".join(names) for names in (entry.columns, entry.rows) if names)
    return f"| {index} | `{entry.paper} {entry.item}` | {part} | {entry.seeds} |"


def test_the_documentation_lists_the_queue_in_order() -> None:
    rows = re.findall(r"^\| \d+ \| .*\|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [documented(entry, index) for index, entry in enumerate(QUEUE, start=1)]


@ENTRIES
def test_entries_select_runs_on_all_images(entry: QueueEntry) -> None:
    _, item = find_item(entry.paper, entry.item)
    rows, columns = item.select_rows(list(entry.rows)), item.select_columns(list(entry.columns))
    keys = planned_keys(item, "long", entry.seeds, rows, columns)
    runs = [key.source for key in keys if isinstance(key.source, Run)]
    assert {key.seed for key in keys} >= set(range(entry.seeds))
    limited = [run.model for run in runs if run_spec(run, "long").max_train_images is not None]
    assert (len(runs) > 0, limited) == (True, [])
