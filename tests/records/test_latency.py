"""The recorded latencies of single images, and the table of them in the documentation."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row["model"]: row for row in json.loads((ROOT / "results/bench/latency.json").read_text())["rows"]}


def test_encoder_of_mazzia2021_is_below_one_megabyte() -> None:
    assert ROWS["mazzia2021_mnist"]["onnx_bytes"] < 1e6


def test_table_of_the_documentation_has_the_recorded_values() -> None:
    text = (ROOT / "docs/export.md").read_text()
    for name, row in ROWS.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        cells = [float(cell.split()[0]) for cell in line.split("|")[2:-1]]
        recorded = [row["onnx_bytes"] / 1e6, row["onnxruntime_ms"], row["eager_ms"], row["compiled_ms"]]
        for cell, value in zip(cells, recorded, strict=True):
            assert abs(cell - value) < 0.01 * value + 0.006
