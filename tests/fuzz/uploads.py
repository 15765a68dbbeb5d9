"""Mutated images for the explorer's upload, and mutated JSON for its other requests.

Every request must be answered with success or, for invalid content, with status 4xx and a sentence of one line.
"""

import io
import json
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.explorer.helpers import SAMPLE, post, request, small_run
from tests.fuzz.harness import Case, Target
from tests.fuzz.hostile import HOSTILE
from tests.fuzz.mutate import mutate
from torchcaps.explorer import create_app
from torchcaps.explorer.arrays import encode_array

__all__ = ["Uploads"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "EPS")
REQUESTS: dict[str, dict[str, Any]] = {
    "/api/forward": {"image": SAMPLE, "iterations": 2},
    "/api/parent": {"image": SAMPLE, "layer": 0, "parent": 0, "iteration": 1},
    "/api/credit": {"image": SAMPLE, "target": 1},
    "/api/decode": {"capsules": encode_array(torch.ones(1, 10, 4))},
}


class Uploads(Target):
    """Requests to the explorer."""

    name, unit = "uploads", "mutants"
    good = ("rejected", "answered")

    def prepare(self, work: Path) -> None:
        """Create the application and the valid images."""
        torch.set_num_threads(1)
        self.app = create_app([small_run()], statistics=False)
        pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3)).astype(np.uint8)
        for path, fields in REQUESTS.items():
            post(self.app, path, fields)
        self.images = {}
        for name in FORMATS:
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, name)
            self.images[name] = buffer.getvalue()

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Send one request."""
        rng = np.random.default_rng([seed, index])
        if rng.random() < 0.6:
            group = FORMATS[int(rng.integers(len(FORMATS)))]
            path, content, kind = "/api/upload", mutate(self.images[group], rng), "image/png"
        else:
            path = group = list(REQUESTS)[int(rng.integers(len(REQUESTS)))]
            content, kind = _change_request(path, rng), "application/json"
        shutil.rmtree(work / self.input, ignore_errors=True)
        (work / self.input).mkdir()
        (work / self.input / "body").write_bytes(content)
        outcome, message = "rejected", ""
        try:
            reply = request(self.app, "POST", path, content, {"content-type": kind})
            if reply.status == 200:
                outcome = "answered"
            elif not 400 <= reply.status < 500:
                outcome, message = f"status-{reply.status}", reply.body.decode()
            elif "\n" in reply.json()["error"]:
                outcome, message = "several-lines", reply.body.decode()
        except BaseException as error:
            outcome, message = "exception", "".join(traceback.format_exception(error)[-3:])
        return Case(index, group, outcome, message)


def _change_request(path: str, rng: np.random.Generator) -> bytes:
    """Return the body of a request with changed bytes, or with another value of a field."""
    fields = dict(REQUESTS[path])
    if rng.random() < 0.3:
        return mutate(json.dumps(fields).encode(), rng)
    value = HOSTILE[int(rng.integers(len(HOSTILE)))]
    if rng.random() < 0.5:
        fields[list(fields)[int(rng.integers(len(fields)))]] = value
    elif "image" in fields:
        key = str(rng.choice(["placement", "second", "attack", "source"]))
        nested = str(rng.choice(["rotation", "scale", "eps", "method", "steps", "sample", "pixels", "right"]))
        fields["image"] = {**SAMPLE, key: {nested: value}}
    else:
        fields["capsules"] = {**fields["capsules"], str(rng.choice(["data", "shape", "dtype"])): value}
    return json.dumps(fields).encode()
