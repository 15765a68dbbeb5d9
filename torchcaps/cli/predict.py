"""``torchcaps predict``."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps._core.files import check_inside, reason_of
from torchcaps.cli.console import escape_control
from torchcaps.cli.options import add_run_flags, load_runs, set_num_threads
from torchcaps.cli.parser import Parser
from torchcaps.data import DataError
from torchcaps.data.images import MAX_MEGAPIXELS
from torchcaps.training.figures import draw_prediction, write_image
from torchcaps.training.inference import Prediction, TrainedRun, predict

__all__ = ["predict_command"]

BAR_WIDTH = 30  # characters for a score of 1
MAX_CLASSES_SHOWN = 10
DESCRIPTION = (
    "Classify image files: score of each class (length or activation of its capsule, or probability), and the "
    "reconstruction as an image. Files of any size and mode are converted to the input of the network; dark digits on "
    "bright paper are inverted for networks trained on bright digits. "
    "Examples: torchcaps predict runs/capsnet_small-digits-1 photo.jpg; "
    "torchcaps predict runs/my_images-1 *.png --json"
)


def predict_command(arguments: list[str]) -> None:
    """Classify image files."""
    parser = Parser("torchcaps predict", DESCRIPTION)
    parser.add_argument("run", help="run directory")
    parser.add_argument("images", nargs="+", help="image files")
    text = "directory of the figures (default: RUN/predictions; with --json no figures)"
    parser.add_argument("--out", type=str | None, help=text)
    text = "whether to invert brightness; auto inverts dark digits on bright paper"
    parser.add_argument("--polarity", type=Literal["auto", "as-is", "inverted"], default="auto", help=text)
    text = "how to fit images of another aspect ratio (default: as the run's images; digits are centred, others padded)"
    parser.add_argument("--fit", type=Literal["crop", "pad", "stretch"] | None, help=text)
    text = "images with more pixels are not decoded; at most 89"
    parser.add_argument("--max-megapixels", type=float, default=MAX_MEGAPIXELS, help=text)
    add_run_flags(parser, "1")
    options, _ = parser.parse(arguments)
    torch.set_num_threads(1)  # faster than several for single images
    set_num_threads(options)
    (run,) = load_runs([options.run], options, options.weights)
    if run.note:
        print(f"torchcaps: {escape_control(run.note)}", file=sys.stderr)
    predictions, problems = [], []
    for path in options.images:
        try:
            predictions.append(predict(run, path, options.polarity, options.fit, options.max_megapixels))
        except DataError as error:
            problems.append((path, str(error)))
    out = Path(options.out).expanduser() if options.out else None if options.json else _default_output(run)
    figures: list[list[Path]] = [[] for _ in predictions]
    if out is not None:
        names = _figure_names(predictions)
        figures = [_write_figures(run, p, out, name) for p, name in zip(predictions, names, strict=True)]
    if options.json:
        rows = [_to_json(run, prediction, files) for prediction, files in zip(predictions, figures, strict=True)]
        print(json.dumps(rows + [{"image": str(path), "error": problem} for path, problem in problems], indent=2))
    else:
        for prediction, files in zip(predictions, figures, strict=True):
            _print_prediction(run, prediction, files)
    for _, problem in problems[:-1]:
        print(f"torchcaps: {escape_control(problem)}", file=sys.stderr)
    if problems:
        raise DataError(problems[-1][1])


def _default_output(run: TrainedRun) -> Path:
    """Return the directory of the figures in the run directory; raise a ValueError if it is a link out of it."""
    out = run.path / "predictions"
    try:
        check_inside(out, run.path)
    except OSError as error:
        raise ValueError(f"{out} must not be written: it is {reason_of(error)}; use --out DIRECTORY") from error
    return out


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
        print(f"  {', '.join(map(str, files))}")


def _to_json(run: TrainedRun, prediction: Prediction, files: list[Path]) -> dict[str, Any]:
    """Return the content of ``--json`` for one image."""
    return {
        "image": str(prediction.path),
        "classes": list(prediction.classes),
        "scores": dict(zip(run.classes, prediction.scores, strict=True)),
        "note": prediction.note,
        "figures": [str(path) for path in files],
    }
