"""The recorded effects of known mistakes, and the table of them in the documentation."""

import json
from pathlib import Path

from tools.mistakes import CORRECT, REFERENCES, TRAINED, WINDOWED, interval

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "results/bench/mistakes.json").read_text())


def test_table_of_the_documentation_has_the_recorded_differences() -> None:
    text = (ROOT / "docs/mistakes.md").read_text()
    for name in TRAINED:
        rows = [row for row in RECORD["rows"] if row["name"] == name]
        assert [row["seed"] for row in rows] == [0, 1, 2]
        if name not in (CORRECT, WINDOWED):
            correct = REFERENCES.get(name, CORRECT)
            reference = [row for row in RECORD["rows"] if row["name"] == correct]
            mean, half = (100 * x for x in interval(rows, reference, RECORD["test_images"]))
            assert f"| {mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f}) |" in text, name
