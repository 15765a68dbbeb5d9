"""The figure of recalls per class."""

from pathlib import Path

import torch
from PIL import Image

from tests.reproduce.items import smoke_store
from tests.reproduce.tables import make_runs, write_run
from torchcaps.papers.measures.coefficients import draw_recalls
from torchcaps.reproduce.schema import Cell, Item, TableRow
from torchcaps.reproduce.statistics import Results


def test_recalls_are_drawn_for_rows_that_have_run(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    cells = {run: {f"class {i}": Cell(None, runs[run], f"recall {i}") for i in range(3)} for run in "ab"}
    columns = {f"class {i}": "test accuracy, %" for i in range(3)}
    item = Item("t", "T", "A table.", columns, tuple(TableRow(label, row) for label, row in cells.items()))
    draw_recalls(Results(item, store), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()  # no record
    # The third class has no test image; none of the first is classified correctly.
    write_run(store, runs["a"], torch.ones(9, dtype=torch.bool), class_correct=[0, 6, 0], class_counts=[3, 6, 0])
    draw_recalls(Results(item, store), tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as image:
        assert image.width < 2_000  # one panel, however many classes there are
