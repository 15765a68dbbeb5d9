"""Time of the explorer's requests: forward pass with trace, its JSON, and decoding, on one thread."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchcaps.data import create_pipeline
from torchcaps.explorer.app import Explorer
from torchcaps.explorer.forward import trace_forward
from torchcaps.explorer.schema import Array, DecodeRequest, ForwardRequest, ImageInput, Source
from torchcaps.explorer.session import ExploredRun
from torchcaps.training.config import RunSpec
from torchcaps.training.inference import TrainedRun
from torchcaps.training.setup import build_network

__all__ = ["BENCH_MODELS", "measure_explorer"]

BENCH_MODELS = ("capsnet_small", "sabour2017_mnist")
N_DECODED = 176  # the strip of 16 dimensions with 11 values each
MIN_REPEAT = 10


def measure_explorer(repeat: int) -> Iterator[dict[str, Any]]:
    """Yield one row per model: the shortest CPU time of a request in seconds, with random weights.

    Args:
        repeat: number of repetitions, at least 10.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for model in BENCH_MODELS:
            yield _measure_model(model, max(repeat, MIN_REPEAT))
    finally:
        torch.set_num_threads(n_threads)


def _measure_model(model: str, repeat: int) -> dict[str, Any]:
    """Return the row of one model."""
    spec = RunSpec.of(model, data="digits")
    torch.manual_seed(0)
    network = build_network(spec)
    pipeline = create_pipeline(spec.recipe.augmentation)
    classes = tuple(str(index) for index in range(network.spec.classes))
    run = ExploredRun(TrainedRun(Path(model), spec, network, pipeline, classes, "last", 0), model)
    explorer = Explorer([run])
    images, _ = run.sample([0])
    request = ForwardRequest(image=ImageInput(source=Source(sample=0)))
    decoder = run.describe()["decoder"]
    shape = [N_DECODED, decoder["classes"], decoder["dim"]]
    data = base64.b64encode(torch.rand(shape).numpy().tobytes()).decode()
    decode = DecodeRequest(capsules=Array(shape=shape, dtype="float32", data=data))
    return {
        "kind": "explorer",
        "model": model,
        "trace_seconds": _shortest(lambda: trace_forward(run, images), repeat),
        "reply_seconds": _shortest(lambda: json.dumps(explorer.forward(request)), repeat),
        "decode_seconds": _shortest(lambda: json.dumps(explorer.decode(decode)), repeat),
    }


def _shortest(compute: Callable[[], object], repeat: int) -> float:
    """Return the shortest CPU time of a call, after one that is not timed."""
    compute()
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        compute()
        times.append(time.thread_time() - start)
    return min(times)
