"""Runs without training, and requests to the application without a server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import create_dataset, create_pipeline
from torchcaps.explorer import ExploredRun
from torchcaps.explorer.arrays import decode_array
from torchcaps.training import RunSpec
from torchcaps.training.inference import TrainedRun
from torchcaps.training.setup import build_network

SMALL = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}
CLASSES = tuple("0123456789")
SAMPLE = {"source": {"sample": 3}}


def untrained_run(
    model: str = "capsnet_small", name: str = "run", max_images: int = 40, path: str = "/nowhere", **changes: Any
) -> ExploredRun:
    """A run with random weights of seed 0."""
    spec = RunSpec.of(model, **changes)
    torch.manual_seed(0)
    network = build_network(spec).eval()
    pipeline = create_pipeline(spec.recipe.augmentation)
    if not pipeline.is_fitted:
        pipeline = pipeline.fit(create_dataset("cifar10", "train", download=False))
    classes = tuple(str(n) for n in range(network.spec.classes))
    run = TrainedRun(Path(path), spec, network, pipeline, classes, "last", 0)
    return ExploredRun(run, name, max_images)


def small_run(**changes: Any) -> ExploredRun:
    return untrained_run(**{**SMALL, **changes})


class Reply:
    """Status, headers and body of a response."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    app: Any, method: str, path: str, body: bytes | dict[str, Any] = b"", headers: dict[str, str] | None = None
) -> Reply:
    """Call an ASGI application as a browser on the same machine would."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    given = {"host": "127.0.0.1:8250", "content-type": "application/json", **(headers or {})}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items() if value is not None]
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": raw,
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8250),
    }
    messages: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(dict(message))

    asyncio.run(app(scope, receive, send))
    return Reply(messages)


def post(app: Any, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """Return the JSON of a POST that must have this status."""
    reply = request(app, "POST", path, body)
    assert reply.status == status, reply.body
    return reply.json()


def array(value: dict[str, Any]) -> Tensor:
    return decode_array(value, "array")
