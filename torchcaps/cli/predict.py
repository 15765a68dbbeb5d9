"""``torchcaps predict``."""

import csv
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps._core.progress import track
from torchcaps.cli.console import escape_control, print_table, start_table
from torchcaps.cli.options import (
    ON_ERROR_HELP,
    OnError,
    add_device_flag,
    add_run_flags,
    load_runs,
    output_path,
    set_num_threads,
)
from torchcaps.cli.parser import Parser
from torchcaps.data import DataError
from torchcaps.data.datasets.folder import IMAGE_SUFFIXES, find_image_files
from torchcaps.data.images import MAX_MEGAPIXELS
from torchcaps.training.figures import draw_prediction, write_image
from torchcaps.training.inference import TrainedRun
from torchcaps.training.prediction import Prediction, predict

__all__ = ["make_predict_parser", "predict_command"]

BAR_WIDTH = 30  # characters for a score of 1
MAX_CLASSES_SHOWN = 10
MAX_FIGURES = 20  # with more images, figures are written only if --out is given, and a table replaces the bars
DESCRIPTION = (
    "Classify image files: score of each class (length or activation of its capsule, or probability), and the "
    "reconstruction as an image. Files of any size and mode are converted to the input of the network; dark digits on "
    "bright paper are inverted for networks trained on bright digits. A directory stands for all images in it and its "
    "subdirectories, in alphabetical order."
)
EXAMPLES = (
    "torchcaps predict runs/capsnet_digits-digits-1 photo.jpg",
    "torchcaps predict runs/my_images-1 ./new_images --csv > predictions.csv",
    "torchcaps predict runs/my_images-1 *.png --json",
    "torchcaps predict model.onnx photo.jpg",
)


def predict_command(arguments: list[str]) -> None:
    """Classify image files."""
    parser = make_predict_parser()
    options, _ = parser.parse(arguments)
    if options.csv and options.json:
        parser.error("--csv and --json are mutually exclusive")
    torch.set_num_threads(1)  # faster than several for single images
    set_num_threads(options)
    (run,) = load_runs([options.run], options, options.weights)
    if run.note:
        print(f"torchcaps: {escape_control(run.note)}", file=sys.stderr)
    paths, is_listing = _find_images(options.images), options.csv or options.json
    rows: list[tuple[str, Prediction | DataError]] = []
    for path in track(paths, "predicting"):
        try:
            rows.append((path, predict(run, path, options.polarity, options.fit, options.max_megapixels)))
        except DataError as error:
            if options.on_error == "fail":
                raise
            rows.append((path, error))
    predictions = [prediction for _, prediction in rows if isinstance(prediction, Prediction)]
    default = None if is_listing or len(paths) > MAX_FIGURES else _default_output(run)
    figures = _write_all_figures(run, predictions, Path(options.out).expanduser() if options.out else default)
    if options.json:
        print(json.dumps([_to_json(run, path, row, figures) for path, row in rows], indent=2))
    elif options.csv:
        _print_csv(run, rows)
    else:
        _print_rows(run, rows, figures)
    _report_failures(rows)


def make_predict_parser() -> Parser:
    """Return the parser of ``torchcaps predict``."""
    parser = Parser("torchcaps predict", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("run", help="run directory, or ONNX file written by torchcaps export")
    parser.add_argument("images", nargs="+", help="image files, or directories of images")
    parser.add_argument("--csv", action="store_true", help="print CSV: image, label, score, score of each class, error")
    text = f"directory of the figures (default: RUN/predictions; none with --json, --csv or over {MAX_FIGURES} images)"
    parser.add_argument("--out", type=str | None, help=text)
    text = "whether to invert brightness; auto inverts dark digits on bright paper"
    parser.add_argument("--polarity", type=Literal["auto", "as-is", "inverted"], default="auto", help=text)
    text = "how to fit images of another aspect ratio (default: as the run's images; digits are centred, others padded)"
    parser.add_argument("--fit", type=Literal["crop", "pad", "stretch"] | None, help=text)
    text = "images with more pixels are not decoded; at most 89"
    parser.add_argument("--max-megapixels", type=float, default=MAX_MEGAPIXELS, help=text)
    parser.add_argument("--on-error", type=OnError, default="skip", help=ON_ERROR_HELP)
    add_run_flags(parser, "1")
    add_device_flag(parser)
    return parser


def _find_images(arguments: list[str]) -> list[str]:
    """Return the image files that the arguments name, in their order; a directory stands for all images below it."""
    paths: list[str] = []
    for argument in arguments:
        directory = Path(argument).expanduser()
        if directory.is_dir():
            found = find_image_files(directory)
            if not found:
                raise DataError(f"{argument} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
            paths += map(str, found)
        else:
            paths.append(argument)
    return paths


def _report_failures(rows: list[tuple[str, Prediction | DataError]]) -> None:
    """Print a warning that counts the images that could not be read; raise a DataError if it is all of them."""
    problems = [error for _, error in rows if isinstance(error, DataError)]
    if len(problems) == len(rows):
        more = f" (and {len(rows) - 1:,} more images can't be read)" if len(rows) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    if problems:
        text = f"{len(problems):,} of {len(rows):,} images can't be read and are skipped, for example: {problems[0]}"
        print(f"torchcaps: {escape_control(text)}", file=sys.stderr)


def _write_all_figures(run: TrainedRun, predictions: list[Prediction], out: Path | None) -> dict[Path, list[Path]]:
    """Write the figures of all predictions; return their paths by image file."""
    if out is None:
        return {}
    names = _figure_names(predictions)
    return {p.path: _write_figures(run, p, out, name) for p, name in zip(predictions, names, strict=True)}


def _default_output(run: TrainedRun) -> Path:
    """Return ``predictions`` in the run directory, or next to an ONNX file; raise a ValueError if it is a link."""
    return output_path(run.path.parent if run.path.is_file() else run.path, "predictions")


def _figure_names(predictions: list[Prediction]) -> list[str]:
    """Return a unique name for the figures of each file: its stem, with a number if several files have the same."""
    names: list[str] = []
    for prediction in predictions:
        stem, number = prediction.path.stem, 1
        while (name := stem if number == 1 else f"{stem}-{number}") in names:
            number += 1
        names.append(name)
    return names


def _write_figures(run: TrainedRun, prediction: Prediction, out: Path, name: str) -> list[Path]:
    """Write the figure of a prediction, and the reconstruction as an image; return their paths."""
    files = [out / f"{name}.png"]
    draw_prediction(prediction, run.classes, files[0])
    if prediction.reconstruction is not None:
        files.append(out / f"{name}-reconstruction.png")
        write_image(prediction.reconstruction, files[1])
    return files


def _print_prediction(run: TrainedRun, prediction: Prediction, files: list[Path]) -> None:
    """Print the predicted classes of an image and a bar chart of the highest scores."""
    classes = " and ".join(prediction.classes) or "no class"
    print(escape_control(f"{prediction.path}: {classes}" + (f"  ({prediction.note})" if prediction.note else "")))
    by_score = sorted(range(len(run.classes)), key=lambda index: -prediction.scores[index])[:MAX_CLASSES_SHOWN]
    shown = sorted(by_score) if len(run.classes) <= MAX_CLASSES_SHOWN else by_score
    names = {index: escape_control(run.classes[index]) for index in shown}
    width = max(map(len, names.values()))
    for index, name in names.items():
        score = prediction.scores[index]
        bar = "█" * round(BAR_WIDTH * min(1.0, max(0.0, score)))
        print(f"  {name:>{width}} {score:6.3f} {bar}")
    if files:
        print(escape_control(f"  {', '.join(map(str, files))}"))


def _print_rows(
    run: TrainedRun, rows: list[tuple[str, Prediction | DataError]], figures: dict[Path, list[Path]]
) -> None:
    """Print a bar chart for each of a few images, or a table of many."""
    if len(rows) <= MAX_FIGURES:
        for _, row in rows:
            if isinstance(row, Prediction):
                _print_prediction(run, row, figures.get(row.path, []))
        return
    table = start_table("image", "label", "score", "note", right=("score",))
    for path, row in rows:
        if isinstance(row, Prediction):
            table.add_row(path, *_label_and_score(run, row), row.note)
        else:
            table.add_row(path, "", "", str(row))
    print_table(table)


def _label_and_score(run: TrainedRun, prediction: Prediction) -> tuple[str, str]:
    """Return the predicted class, or classes, and the highest score as texts."""
    return " and ".join(prediction.classes), f"{max(prediction.scores):.4f}"


def _print_csv(run: TrainedRun, rows: list[tuple[str, Prediction | DataError]]) -> None:
    """Print one line per image, in the given order; failures have an error instead of label and scores.

    Control characters are escaped, as in all output but JSON.
    """
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = [escape_control(name) for name in run.classes]
    writer.writerow(["image", "label", "score", *(f"score:{name}" for name in names), "error"])
    for path, row in rows:
        if isinstance(row, Prediction):
            texts = map(escape_control, (path, *_label_and_score(run, row)))
            writer.writerow([*texts, *(f"{score:.6f}" for score in row.scores), ""])
        else:
            writer.writerow([escape_control(path), "", "", *("" for _ in names), escape_control(str(row))])


def _to_json(
    run: TrainedRun, path: str, row: Prediction | DataError, figures: dict[Path, list[Path]]
) -> dict[str, Any]:
    """Return the content of ``--json`` for one image; ``label`` and ``score`` are null if it can't be read."""
    if isinstance(row, DataError):
        return {"image": path, "label": None, "score": None, "error": str(row)}
    return {
        "image": path,
        "label": " and ".join(row.classes),
        "score": max(row.scores),
        "classes": list(row.classes),
        "scores": dict(zip(run.classes, row.scores, strict=True)),
        "note": row.note,
        "figures": [str(file) for file in figures.get(row.path, [])],
    }
