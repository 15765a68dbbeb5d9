"""Recorded comparison of routings: the page is that of the records."""

from pathlib import Path

from torchcaps.bench.routings import SCALES
from torchcaps.bench.routings_report import read_rows, render_page

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results/bench/routings/cpu"


def test_page_is_written_from_the_records() -> None:
    figure = "images/routings.png" if (ROOT / "docs/images/routings.png").exists() else None
    assert (ROOT / "docs/routings.md").read_text() == render_page(RECORDS, SCALES["cpu"], figure)


def test_recorded_rows_learn() -> None:
    """A row far below the others would be a defect of the network or of the routing, not a result."""
    mnist = next(comparison for comparison in SCALES["cpu"] if comparison.data == "mnist")
    for row in read_rows(RECORDS, mnist):
        assert row.accuracy is None or row.accuracy.mean > 0.9, row.name
