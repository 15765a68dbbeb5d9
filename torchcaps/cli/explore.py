"""``torchcaps explore``."""

import sys
import webbrowser
from pathlib import Path

import torch

from torchcaps._core.optional import import_optional
from torchcaps.cli.console import escape_control
from torchcaps.cli.options import add_trust_flag, add_weights_flag, check_positive, load_runs
from torchcaps.cli.parser import Parser

__all__ = ["explore_command"]

MAX_RUNS = 2
DESCRIPTION = (
    "Open a page in the browser that shows what a network makes of an image: draw, pick or upload one, and see class "
    "capsules, couplings of every routing iteration, primary capsules, the decoder and statistics of the test set. Two "
    "runs are compared side by side. The server is reachable from this computer only, and ends with Ctrl-C."
)
EXAMPLES = (
    "torchcaps explore runs/capsnet_digits-digits-1",
    "torchcaps explore runs/mine-1 runs/mine-2",
    "torchcaps explore runs/mine-1 --export page.html",
)


def explore_command(arguments: list[str]) -> None:
    """Serve the explorer's page for one or two runs, or write it to a file."""
    parser = Parser("torchcaps explore", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="one or two run directories (default: the pretrained network of the package)",
    )
    parser.add_argument("--port", type=int, default=8250, help="port; if it is in use, another one is taken")
    text = "address to bind to; any other than 127.0.0.1 lets other computers use the page, without a password"
    parser.add_argument("--host", type=str, default="127.0.0.1", help=text)
    text = "write one self-contained file with samples of the test set instead of starting a server"
    parser.add_argument("--export", type=str | None, help=text)
    parser.add_argument("--browser", type=bool, default=True, help="open the page in the default browser")
    parser.add_argument("--max-images", type=int, default=1000, help="largest number of test images to use")
    add_weights_flag(parser)
    parser.add_argument("--num-threads", type=int, default=1, help="number of CPU threads")
    add_trust_flag(parser)
    options, _ = parser.parse(arguments)
    check_positive(parser, options, "num_threads", "max_images")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be in 0..65535, got {options.port}")
    if len(options.runs) > MAX_RUNS:
        parser.error(f"at most {MAX_RUNS} runs can be compared, got {len(options.runs)}")
    for package in ("fastapi", "uvicorn"):
        import_optional(package, "the explorer")
    torch.set_num_threads(options.num_threads)  # one is faster than several for single images
    from torchcaps.explorer import ExploredRun, export_page, load_pretrained_run, serve

    runs = load_runs(options.runs, options, options.weights)
    if not runs:
        pretrained = load_pretrained_run()
        if pretrained is None:
            parser.error("no run given: train one in a minute with 'torchcaps train', then torchcaps explore RUN")
        runs = [pretrained]

    names = [run.path.name or str(run.path) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({n})" for n, name in enumerate(names, 1)]
    explored = [ExploredRun(run, name, options.max_images) for run, name in zip(runs, names, strict=True)]
    for run in runs:
        if run.note:
            print(f"torchcaps: {escape_control(run.note)}", file=sys.stderr)
    if options.export is not None:
        path = Path(options.export).expanduser()
        size = export_page(explored, path)
        print(f"{path}: {size / 1e6:.1f} MB; open it in a browser")
        return

    def announce(url: str) -> None:
        print(f"explorer: {url}  (Ctrl-C to stop)", flush=True)
        if options.browser:
            webbrowser.open(url)

    serve(explored, options.host, options.port, announce)
