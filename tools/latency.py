"""Measure the latency of single images: onnxruntime, torch eager, its convolutions alone, torch.compile; one thread.

    python tools/latency.py [MODEL ...]

Writes results/bench/latency.json after each model. The programs are called in turn, with one image, for
`N_ROUNDS` rounds; each value is the least CPU time of a call, which other processes affect less than wall time.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import create_model
from torchcaps.export import to_onnx
from torchcaps.export.onnx_file import start_session

RECORD = Path(__file__).resolve().parent.parent / "results" / "bench" / "latency.json"
MODELS = ("mazzia2021_mnist", "capsnet_small", "sabour2017_mnist")
N_WARM_UP, N_ROUNDS = 3, 200


def least_cpu_ms(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least CPU time of each call, in interleaved rounds."""
    least = dict.fromkeys(calls, float("inf"))
    for index in range(N_WARM_UP + N_ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if index >= N_WARM_UP:
                least[name] = min(least[name], 1000 * (time.process_time() - start))
    return least


def record_convolutions(model: nn.Module, image: Tensor) -> Callable[[], object]:
    """Return a function that computes the convolutions of a model for an image, and nothing else."""
    calls: list[tuple[Any, Tensor]] = []
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0]))) for layer in layers
    ]
    model(image)
    for hook in hooks:
        hook.remove()

    def compute() -> None:
        for layer, inputs in calls:
            F.conv2d(inputs, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    return compute


def measure(name: str) -> dict[str, object]:
    """Return the row of one model."""
    torch.manual_seed(0)
    image = torch.rand(1, *create_model(name).spec.image)
    model = create_model(name, reconstruction=False).eval()  # the encoder
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        exported = to_onnx(model, Path(directory, "model.onnx"))
        session = start_session(exported.path.read_bytes(), 1)
        compiled = torch.compile(model)
        calls = {
            "onnxruntime": lambda: session({"images": image}),
            "eager": lambda: model(image),
            "convolutions": record_convolutions(model, image),
            "compiled": lambda: compiled(image),
        }
        least = least_cpu_ms(calls)
    return {
        "model": name,
        "onnx_bytes": exported.n_bytes,
        "largest_difference": exported.parity.difference,
        **{f"{key}_ms": round(value, 3) for key, value in least.items()},
    }


def main(*names: str) -> None:
    """Measure the models and record the rows."""
    torch.set_num_threads(1)
    rows = []
    for name in names or MODELS:
        rows.append(measure(name))
        print(json.dumps(rows[-1]), flush=True)
        record = {"torch": torch.__version__, "threads": 1, "batch_size": 1, "rows": rows}
        record |= {"quantity": "least CPU time of interleaved calls", "rounds": N_ROUNDS}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
