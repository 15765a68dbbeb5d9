"""The explorer's web application: the page and its JSON API."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from torchcaps._core.version import __version__
from torchcaps.data import DataError
from torchcaps.explorer import schema
from torchcaps.explorer.arrays import decode_array, encode_array
from torchcaps.explorer.details import describe_credit, describe_parent
from torchcaps.explorer.forward import describe_forward
from torchcaps.explorer.inputs import MAX_UPLOAD_BYTES, InputCache, read_upload
from torchcaps.explorer.security import Guard
from torchcaps.explorer.session import ExploredRun, compute_lock
from torchcaps.explorer.statistics import Statistics

__all__ = ["Explorer", "create_app"]

PAGE = resources.files("torchcaps.explorer") / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_SAMPLES_PER_REQUEST = 100
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "application/octet-stream")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorBody, "description": text}
    for status, text in {
        400: "The request can't be computed, or is not valid JSON.",
        403: "A request of another site.",
        408: "The body stopped coming.",
        413: "The body is too large.",
        421: "The Host header is not this server's address.",
        415: "The Content-Type is not accepted.",
        422: "A field is invalid.",
        503: "Too many requests at once.",
    }.items()
}


class Explorer:
    """The runs that are explored, with their statistics and the cache of inputs.

    Args:
        runs: one or two runs.
    """

    def __init__(self, runs: list[ExploredRun]) -> None:
        self.runs = runs
        self.inputs = InputCache(runs)
        self.statistics = [Statistics(run) for run in runs]

    def run(self, index: int) -> ExploredRun:
        """Return a run; raise a ValueError for an index that does not exist."""
        if index >= len(self.runs):
            raise ValueError(f"run must be below {len(self.runs)}, the number of runs, got {index}")
        return self.runs[index]

    def info(self) -> dict[str, Any]:
        """Return the description of all runs."""
        return {"version": __version__, "runs": [run.describe() for run in self.runs]}

    def forward(self, request: schema.ForwardRequest) -> dict[str, Any]:
        """Run a network on an input."""
        run = self.run(request.run)
        with compute_lock:
            resolved = self.inputs.resolve(request.image, request.run)
            n_decoded = 1 if request.image.second is None else 2
            return describe_forward(run, resolved, request.iterations, request.sites, n_decoded)

    def parent(self, request: schema.ParentRequest) -> dict[str, Any]:
        """Return the numbers of one parent."""
        run = self.run(request.run)
        with compute_lock:
            resolved = self.inputs.resolve(request.image, request.run)
            where = (request.layer, request.site, request.parent, request.iteration)
            return describe_parent(run, resolved, *where, request.iterations)

    def credit(self, request: schema.TargetRequest) -> dict[str, Any]:
        """Return the credit of each pixel for a class."""
        run = self.run(request.run)
        with compute_lock:
            resolved = self.inputs.resolve(request.image, request.run)
            return describe_credit(run, resolved, request.target, request.iterations)

    def decode(self, request: schema.DecodeRequest) -> dict[str, Any]:
        """Decode class capsules that are already masked."""
        run = self.run(request.run)
        network = run.capsules
        if network is None or network.decoder is None:
            raise ValueError(run.missing_parts()["decoder"])
        decoder = network.decoder
        capsules = decode_array(request.capsules.model_dump(), "capsules").float()
        if capsules.dim() != 3 or tuple(capsules.shape[1:]) != (decoder.parents, decoder.dim):
            expected = f"[n, {decoder.parents}, {decoder.dim}]"
            raise ValueError(f"capsules must have the shape {expected}, got {list(capsules.shape)}")
        if not 1 <= len(capsules) <= schema.MAX_DECODED:
            raise ValueError(f"capsules must have 1 to {schema.MAX_DECODED} rows, got {len(capsules)}")
        with compute_lock, torch.no_grad():
            images = decoder.layers(capsules.flatten(1)).unflatten(-1, decoder.image)
        return {"images": encode_array(images)}

    def samples(
        self, run: int, sort: str, true: int | None, predicted: int | None, offset: int, limit: int
    ) -> dict[str, Any]:
        """Return test images with labels and predictions."""
        explored, statistics = self.run(run), self.statistics[run]
        order = statistics.order(sort, true, predicted)
        chosen = order[offset : offset + limit]
        if not chosen:
            return {"ready": statistics.ready, "total": len(order), "samples": []}
        images, labels = explored.sample(chosen)
        rows = zip(chosen, images, explored.label_sets(labels), strict=True)
        samples = [statistics.describe_sample(*row) for row in rows]
        return {"ready": statistics.ready, "total": len(order), "samples": samples}

    def upload(self, content: bytes) -> dict[str, str]:
        """Return an uploaded image as pixels of the first run."""
        pixels, note = read_upload(self.runs[0], content)
        data = bytes((pixels * 255).round().clamp(0, 255).to(torch.uint8).flatten().tolist())
        return {"pixels": base64.b64encode(data).decode(), "note": note}


def create_app(runs: list[ExploredRun], host: str = "127.0.0.1", statistics: bool = True) -> Guard:
    """Return the ASGI application.

    Args:
        runs: one or two runs.
        host: address that the server is bound to; see `torchcaps.explorer.security.Guard`.
        statistics: compute the statistics over the test images in the background.

    >>> from starlette.testclient import TestClient
    >>> from torchcaps.explorer import load_pretrained_run
    >>> run = ExploredRun(load_pretrained_run(), "pretrained", max_images=20)
    >>> client = TestClient(create_app([run], statistics=False), base_url="http://127.0.0.1")
    >>> client.get("/api/info").json()["runs"][0]["name"]
    'pretrained'
    """
    explorer = Explorer(runs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Start the computation of the statistics, if enabled, with the server; stop it with the server."""
        for item in explorer.statistics if statistics else ():
            item.start()
        yield
        for item in explorer.statistics:
            item.stop()

    app = FastAPI(
        title="torchcaps explorer",
        version=__version__,
        description="Forward passes of trained capsule networks with couplings of every iteration.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.state.explorer = explorer
    _add_errors(app)
    _add_api(app, explorer)
    _add_page(app)
    return Guard(app, host)


def _reply(compute: Callable[[], Any]) -> Response:
    """Return a result as JSON; an invalid argument is a 400 with its sentence."""
    try:
        result = compute()
    except (ValueError, TypeError, DataError) as error:
        return JSONResponse({"error": " ".join(str(error).split())}, 400)
    try:
        content = json.dumps(result, allow_nan=False)
    except ValueError:
        return JSONResponse({"error": "the network computes NaN or infinite values for this input"}, 400)
    return Response(content, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    """Report every error as one sentence."""

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """Return the first validation error of a request as one sentence, with status 422."""
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse({"error": f"the body must be valid JSON: {first['ctx']['error']}"}, 422)
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse({"error": f"{where or 'the body'}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    def rejected(request: Request, error: HTTPException) -> JSONResponse:
        """Return an HTTP error as one sentence, with its status."""
        sentences = {
            400: "the body must be valid JSON, without very large numbers or deep nesting",
            404: "there is no such path: /openapi.json lists all",
            405: "this method is not allowed here: /openapi.json lists all",
        }
        return JSONResponse({"error": sentences.get(error.status_code, error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"the server failed with {type(error).__name__}; it is still running"}, 500)


def _add_api(app: FastAPI, explorer: Explorer) -> None:
    """Add the routes of the JSON API."""
    result: Any = {"response_class": JSONResponse, "responses": {200: {"model": schema.Result}}}

    @app.get("/api/info", **result)
    def info() -> Response:
        """Describe the runs: model, classes, layers, and the parts that they lack."""
        return _reply(explorer.info)

    @app.get("/api/training", **result)
    def training(run: schema.RunIndex = 0) -> Response:
        """Return the layer table, the learning curve and the settings of a run."""
        return _reply(lambda: explorer.run(run).training)

    @app.get("/api/statistics", **result)
    def statistics(run: schema.RunIndex = 0) -> Response:
        """Return the confusion matrix, score histograms, dead capsules and coupling entropy."""
        return _reply(lambda: explorer.statistics[run].describe() if explorer.run(run) else None)

    @app.get("/api/samples", response_class=JSONResponse, responses={200: {"model": schema.SampleList}})
    def samples(
        run: schema.RunIndex = 0,
        sort: Literal["index", "error", "uncertainty"] = "index",
        true: Annotated[int | None, Query(ge=0, le=100_000)] = None,
        predicted: Annotated[int | None, Query(ge=0, le=100_000)] = None,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES_PER_REQUEST)] = 24,
    ) -> Response:
        """Return test images, sorted and filtered by label and prediction."""
        return _reply(lambda: explorer.samples(run, sort, true, predicted, offset, limit))

    @app.post("/api/forward", **result)
    def forward(request: schema.ForwardRequest) -> Response:
        """Run the network on an image, with the couplings of every layer and iteration."""
        return _reply(lambda: explorer.forward(request))

    @app.post("/api/parent", **result)
    def parent(request: schema.ParentRequest) -> Response:
        """Return logits, couplings, votes and sum of one parent in one iteration."""
        return _reply(lambda: explorer.parent(request))

    @app.post("/api/credit", **result)
    def credit(request: schema.TargetRequest) -> Response:
        """Return the credit of each pixel for a class, by couplings and by the gradient."""
        return _reply(lambda: explorer.credit(request))

    @app.post("/api/decode", response_class=JSONResponse, responses={200: {"model": schema.Decoded}})
    def decode(request: schema.DecodeRequest) -> Response:
        """Decode class capsules to images."""
        return _reply(lambda: explorer.decode(request))

    content = {name: {"schema": {"type": "string", "format": "binary"}} for name in IMAGE_TYPES}
    described = {"requestBody": {"content": content, "required": True}}
    uploaded: dict[int | str, dict[str, Any]] = {200: {"model": schema.Uploaded}}

    @app.post("/api/upload", response_class=JSONResponse, responses=uploaded, openapi_extra=described)
    async def upload(request: Request) -> Response:
        """Convert an image file of at most 5 MB and 16 megapixels to pixels of the first run's network."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in IMAGE_TYPES:
            return JSONResponse({"error": f"the Content-Type must be one of {', '.join(IMAGE_TYPES)}"}, 415)
        body = await request.body()
        if len(body) > MAX_UPLOAD_BYTES:
            return JSONResponse({"error": f"the upload must have at most {MAX_UPLOAD_BYTES // 2**20} MB"}, 413)
        return await run_in_threadpool(_reply, lambda: explorer.upload(body))


def _add_page(app: FastAPI) -> None:
    """Serve the files of the page, read once: no request names a path on disk."""
    files = {entry.name: entry.read_bytes() for entry in PAGE.iterdir() if entry.is_file()}

    def respond(name: str) -> Response:
        suffix = name[name.rfind(".") :]
        return Response(files[name], media_type=MEDIA_TYPES.get(suffix, "application/octet-stream"))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return respond("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "no such file")
        return respond(name)

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return respond("icon.svg")
