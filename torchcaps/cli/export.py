"""``torchcaps export``."""

import json
from pathlib import Path
from typing import Any, Literal

from torchcaps.cli.command_line import CommandLine
from torchcaps.cli.console import escape_control, exit_with_failure, percent, print_table, start_table
from torchcaps.cli.options import (
    add_data_flags,
    add_run_flags,
    check_positive,
    load_runs,
    open_dataset,
    set_num_threads,
)
from torchcaps.cli.parser import Parser
from torchcaps.data import Dataset
from torchcaps.export import Exported, ParityError, export_run, load_onnx, quantize_onnx
from torchcaps.training.inference import TrainedRun, evaluate_runs
from torchcaps.training.setup import limit_images

__all__ = ["export_command"]

DESCRIPTION = (
    "Export the network of a run to ONNX or to a torch.export program (pt2), for any batch size, with its "
    "preprocessing and classes. All outputs are compared with those of the network on test images at two batch sizes; "
    "the file is written only if they agree. 'torchcaps predict' and 'torchcaps evaluate' accept ONNX files."
)
EXAMPLES = (
    "torchcaps export runs/capsnet_digits-digits-1",
    "torchcaps export runs/capsnet_digits-digits-1 --quantize int8",
    "torchcaps export runs/capsnet_digits-digits-1 --format pt2 --plain",
)


def export_command(arguments: list[str]) -> None:
    """Export a run."""
    line = CommandLine.split(arguments, ("--trace", "--plain"))
    parser = Parser("torchcaps export", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--format", type=Literal["onnx", "pt2"], default="onnx", help="format of the file")
    parser.add_argument("--out", type=str | None, help="file to write (default: RUN/model.onnx or RUN/model.pt2)")
    parser.add_argument("--trace", type=bool, default=False, help="add the couplings of every iteration as outputs")
    text = "pt2 only: a program without operators of torchcaps, which loads without it"
    parser.add_argument("--plain", type=bool, default=False, help=text)
    text = "ONNX only: decoder inside the graph, beside it in a file NAME-decoder.onnx, or not exported"
    parser.add_argument("--decoder", type=Literal["inside", "beside", "none"], default="inside", help=text)
    text = "ONNX only: also write NAME-int8.onnx or NAME-float16.onnx, and evaluate both files on the test set"
    parser.add_argument("--quantize", type=Literal["int8", "float16"] | None, help=text)
    add_data_flags(parser, line)
    text = "with --quantize: evaluate on at most this number of images, a fixed random subset (default: all)"
    parser.add_argument("--max-images", type=int | None, help=text)
    add_run_flags(parser)
    options, _ = parser.parse(line)
    check_positive(parser, options, "num_threads", "max_images")
    if options.quantize and options.format != "onnx":
        parser.error("--quantize applies to --format onnx only")
    set_num_threads(options)
    (run,) = load_runs([options.run], options, options.weights)
    dataset = open_dataset(run, options)
    settings = {"trace": options.trace, "plain": options.plain, "decoder": options.decoder}
    try:
        exported = export_run(run, options.out, options.format, dataset=dataset, **settings)
    except ParityError as error:
        exit_with_failure(error)
    rows = [_row(exported.path, exported.n_bytes)]
    if options.quantize:
        rows = _quantize(exported, options.quantize, limit_images(dataset, options.max_images))
    if options.json:
        print(json.dumps(_to_json(run, exported, rows), indent=2))
    else:
        _print(exported, rows)


def _row(path: Path, n_bytes: int) -> dict[str, Any]:
    return {"file": str(path), "bytes": n_bytes}


def _quantize(exported: Exported, kind: Literal["int8", "float16"], dataset: Dataset) -> list[dict[str, Any]]:
    """Quantise a file; return size and accuracy of both on images of the test set."""
    path = exported.path.with_name(f"{exported.path.stem}-{kind}{exported.path.suffix}")
    n_bytes = quantize_onnx(exported.path, path, kind)
    rows = [_row(exported.path, exported.n_bytes), _row(path, n_bytes)]
    for row in rows:
        evaluation = evaluate_runs([load_onnx(row["file"])], dataset)
        low, high = evaluation.interval
        row |= {"n": evaluation.n, "accuracy": evaluation.accuracy, "interval": [low, high]}
    return rows


def _to_json(run: TrainedRun, exported: Exported, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``--json``."""
    return {
        "run": str(run.path),
        "outputs": list(exported.outputs),
        "largest_difference": exported.parity.difference,
        "largest_difference_of": exported.parity.output,
        "batch_sizes": list(exported.parity.batch_sizes),
        "decoder": None if exported.decoder is None else str(exported.decoder),
        "files": rows,
    }


def _print(exported: Exported, rows: list[dict[str, Any]]) -> None:
    """Print names of outputs, the largest difference from the model, and size and accuracy of each file."""
    parity = exported.parity
    sizes = " and ".join(map(str, parity.batch_sizes))
    print(f"outputs: {', '.join(exported.outputs)}")
    print(f"largest difference: {parity.difference:.1e} ({parity.output}), at batch sizes {sizes}\n")
    table = start_table("file", "size", "images", "accuracy", "95 % interval", right=("size", "images", "accuracy"))
    if exported.decoder is not None:
        rows = [*rows, _row(exported.decoder, exported.decoder.stat().st_size)]
    for row in rows:
        size = f"{row['bytes'] / 2**20:.2f} MiB"
        if "accuracy" in row:
            low, high = row["interval"]
            interval = f"{100 * low:.2f} to {100 * high:.2f} %"
            table.add_row(escape_control(row["file"]), size, f"{row['n']:,}", percent(row["accuracy"]), interval)
        else:
            table.add_row(escape_control(row["file"]), size, "", "", "")
    print_table(table)
