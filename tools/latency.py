"""Measure the latency of single images: onnxruntime, torch eager and torch.compile, one thread.

    python tools/latency.py [MODEL ...]

Writes results/bench/latency.json. Each value is the median of the times of `N_CALLS` calls with one image.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchcaps import create_model
from torchcaps.export import to_onnx
from torchcaps.export.onnx_file import start_session

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("mazzia2021_mnist", "capsnet_small", "sabour2017_mnist")
N_CALLS = 50


def median_ms(call: Callable[[], object]) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(N_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)


def main(*names: str) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in names or MODELS:
        torch.manual_seed(0)
        model = create_model(name).eval()
        image = torch.rand(1, *model.spec.image)
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            exported = to_onnx(model, Path(directory, "model.onnx"), decoder="none")
            session = start_session(exported.path.read_bytes(), 1)
            model = create_model(name, reconstruction=False).eval()  # the encoder, as exported
            compiled = torch.compile(model)
            row = {
                "model": name,
                "onnx_bytes": exported.n_bytes,
                "largest_difference": exported.parity.difference,
                "onnxruntime_ms": median_ms(lambda: session({"images": image})),  # noqa: B023
                "eager_ms": median_ms(lambda: model(image)),  # noqa: B023
                "compiled_ms": median_ms(lambda: compiled(image)),  # noqa: B023
            }
        print(json.dumps(row), flush=True)
        rows.append(row)
    record = {"torch": torch.__version__, "threads": 1, "batch_size": 1, "calls": N_CALLS, "rows": rows}
    (ROOT / "results" / "bench" / "latency.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
