"""Write the page as one self-contained file, with samples of the test set and the decoder's weights."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from torchcaps._core.files import write_atomic
from torchcaps.analysis.common import round_robin_indices
from torchcaps.explorer.app import PAGE, Explorer
from torchcaps.explorer.arrays import decode_array, encode_array
from torchcaps.explorer.schema import ForwardRequest, ImageInput, ParentRequest, Source, TargetRequest
from torchcaps.explorer.session import ExploredRun

__all__ = ["MAX_PAGE_BYTES", "export_page"]

MAX_PAGE_BYTES = 5_000_000
N_ERRORS = 6  # of the samples, the most confident errors
# Number of samples and dtype of their arrays, the best first; the first that fits is taken.
CHOICES = (
    (24, "float32"),
    (16, "float32"),
    (16, "float16"),
    (8, "float16"),
    (4, "float16"),
    (2, "float16"),
    (1, "float16"),
)
EXACT = ("pose", "image")  # small arrays that stay in float32: the decoder's input
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"


def export_page(runs: list[ExploredRun], path: Path) -> int:
    """Write the page of one or two runs to a file that opens without a server; return its size in bytes.

    The file has forward passes of some test images. The decoder runs in the page, with weights rounded to float16, so
    that its sliders work; if the file would exceed 5 MB, it has fewer samples and finally no decoder.

    Args:
        runs: one or two runs with test images.
        path: the file, replaced atomically.

    >>> from torchcaps.explorer import load_pretrained_run
    >>> run = ExploredRun(load_pretrained_run(), "pretrained", max_images=20)
    >>> 0 < export_page([run], Path("page.html")) <= MAX_PAGE_BYTES
    True
    """
    for run in runs:
        if run.why_no_samples:
            raise ValueError(f"{run.name} can't be exported: {run.why_no_samples}")
    explorer = Explorer(runs)
    for statistics in explorer.statistics:
        statistics.wait()
        if statistics.problem:  # such as weights that are NaN
            raise ValueError(f"{statistics.run.name} can't be exported: {statistics.problem}")
    decoders: list[Any] = [_describe_decoder(run) for run in runs]
    order = _choose_samples(explorer, CHOICES[0][0])
    results = [[_describe_sample(explorer, n, index) for index in order] for n in range(len(runs))]
    for with_decoders in (True, False):
        for count, dtype in CHOICES:
            chosen = order[:count]
            data = _page_data(explorer, chosen, results, dtype, decoders if with_decoders else [None] * len(runs))
            page = _build_page(data)
            if len(page) <= MAX_PAGE_BYTES:
                write_atomic(path, page, ValueError)
                return len(page)
    raise ValueError(f"{path} can't be written in {MAX_PAGE_BYTES:,} bytes: a single sample of this network is larger")


def _choose_samples(explorer: Explorer, count: int) -> list[int]:
    """Return indices of test images: alternately of every class, with the most confident errors of the first run."""
    statistics, run = explorer.statistics[0], explorer.runs[0]
    wrong = (statistics.true != statistics.predicted).any(1)
    errors = [index for index in statistics.order("error") if wrong[index]][:N_ERRORS]
    labels = statistics.true.int().argmax(1)
    others = [index for index in round_robin_indices(labels, ~wrong) if index < run.n_samples]
    mixed = others[: max(1, count - len(errors))]
    # Errors after each class was shown once.
    n_first = min(len(mixed), run.model.spec.classes, count // 2)
    return [*mixed[:n_first], *errors, *mixed[n_first:]][:count]


def _describe_sample(explorer: Explorer, run: int, index: int) -> dict[str, Any]:
    """Return everything that the page shows of one test image."""
    image = ImageInput(source=Source(sample=index))
    forward = explorer.forward(ForwardRequest(run=run, image=image))
    target = forward["order"][0]
    described: dict[str, Any] = {"forward": forward, "credit": {}, "parents": {}}
    described["credit"][target] = explorer.credit(TargetRequest(run=run, image=image, target=target))
    if explorer.runs[run].capsules is not None:
        last = len(forward["layers"]) - 1
        for t in range(forward["layers"][last].get("iterations", 0)):
            request = ParentRequest(run=run, image=image, layer=last, parent=target, iteration=t)
            described["parents"][f"{last}-{target}-{t}"] = explorer.parent(request)
    return described


def _page_data(
    explorer: Explorer, order: list[int], results: list[list[dict[str, Any]]], dtype: str, decoders: list[Any]
) -> dict[str, Any]:
    """Return the content of the file's data element."""
    info = explorer.info()
    for run, decoder in zip(info["runs"], decoders, strict=True):
        run["n_samples"] = len(order)
        if decoder is None and run["decoder"] is not None:
            run["decoder"] = None
            run["missing"]["decoder"] = "The decoder's weights are too large for this file: use torchcaps explore."
    samples = []
    for run, statistics in zip(explorer.runs, explorer.statistics, strict=True):
        images, labels = run.sample(order)
        errors, margins = statistics.error(), statistics.margin()
        rows = zip(order, images, run.label_sets(labels), strict=True)
        samples.append(
            [
                {
                    **statistics.describe_sample(*row),
                    "error": float(errors[row[0]]),
                    "uncertainty": -float(margins[row[0]]),
                }
                for row in rows
            ]
        )

    def collect(key: str) -> list[dict[int, Any]]:
        rounded = [[_round_arrays(row[key], dtype) for row in rows[: len(order)]] for rows in results]
        return [dict(zip(order, rows, strict=True)) for rows in rounded]

    return {
        "info": info,
        "order": order,
        "reason": (
            f"This file has {len(order)} images of the test set. To draw, move or attack an image, "
            f"run: {_explore_command(info['runs'])}"
        ),
        "training": [_without_paths(run.training) for run in explorer.runs],
        "statistics": [statistics.describe() for statistics in explorer.statistics],
        "samples": samples,
        "forward": collect("forward"),
        "credit": collect("credit"),
        "parents": collect("parents"),
        "decoders": decoders,
    }


def _explore_command(runs: list[dict[str, Any]]) -> str:
    """Return the command that serves runs; the network of the package is the default, not a directory."""
    names = [run["name"] for run in runs if run["weights"] != "pretrained"]
    return " ".join(["torchcaps explore", *names])


def _without_paths(training: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a training without directories of this machine, for a file to share."""
    settings = {key: value for key, value in training["settings"].items() if key != "data_dir"}
    return {**training, "settings": settings}


def _round_arrays(value: Any, dtype: str, name: str = "") -> Any:
    """Return a result with its float32 arrays in another dtype, but for those named in `EXACT`."""
    if isinstance(value, list):
        return [_round_arrays(item, dtype) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("dtype") == "float32" and name not in EXACT and dtype != "float32":
        return encode_array(decode_array(value, name), dtype)
    return {key: _round_arrays(item, dtype, key) for key, item in value.items()}


def _describe_decoder(run: ExploredRun) -> list[dict[str, Any]] | None:
    """Return the weights of the decoder's linear layers in float16, or ``None`` without a decoder."""
    network = run.capsules
    if network is None or network.decoder is None:
        return None
    layers = [layer for layer in network.decoder.layers if isinstance(layer, nn.Linear)]
    return [
        {"weight": encode_array(layer.weight, "float16"), "bias": encode_array(layer.bias, "float16")}
        for layer in layers
    ]


def _build_page(data: dict[str, Any]) -> bytes:
    """Return the page with styles, modules and data inside; modules import each other through an import map."""
    files = {entry.name: entry.read_text(encoding="utf-8") for entry in PAGE.iterdir() if entry.is_file()}
    imports = {}
    for name, text in files.items():
        if name.endswith(".js"):
            source = re.sub(r'from "\./', 'from "explorer/', text)
            imports[f"explorer/{name}"] = f"data:text/javascript;base64,{base64.b64encode(source.encode()).decode()}"
    icon = base64.b64encode(files["icon.svg"].encode()).decode()
    head = "\n".join(
        [
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
            f"<style>\n{files['style.css']}</style>",
            f'<script type="importmap">{json.dumps({"imports": imports})}</script>',
            '<script type="module">import "explorer/main.js";</script>',
        ]
    )
    content = json.dumps(data, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    page = re.sub(r"\s*<(link|script)[^>]*static/[^>]*>(</script>)?", "", files["index.html"])
    page = page.replace("</head>", f"{head}\n  </head>")
    page = page.replace("</body>", f'<script type="application/json" id="data">{content}</script>\n  </body>')
    return page.encode()
