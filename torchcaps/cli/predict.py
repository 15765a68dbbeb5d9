"""``torchcaps predict``."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps.cli.parser import Parser
from torchcaps.cli.words import Flags
from torchcaps.data import DataError
from torchcaps.training.figures import draw_prediction, write_image
from torchcaps.training.inference import Trained, load_run
from torchcaps.training.predict import Prediction, predict

__all__ = ["predict_command"]

BAR = 30  # characters of a score of 1
SHOWN = 10  # classes that are shown; of more the best
DESCRIPTION = (
    "Say what is on images: the class, how long each class's capsule is (or how sure the network is), and what the "
    "decoder makes of it, as a picture. Files of any size and mode are brought into the form that the network knows; "
    "dark digits on paper are inverted for networks that know bright ones on black. "
    "Examples: torchcaps predict runs/capsnet_small-digits-1 photo.jpg; "
    "torchcaps predict runs/my_images-1 *.png --json"
)


def predict_command(words: list[str]) -> None:
    """Say what is on images."""
    sys.path.insert(0, os.getcwd())
    parser = Parser(prog="torchcaps predict", description=DESCRIPTION)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--out", type=str | None, help="where pictures go (default: RUN/predictions)")
    parser.add_argument(
        "--weights",
        type=Literal["last", "best", "ema"] | None,
        help="last, best or average (default: as the run's recipe says)",
    )
    polarities = Literal["auto", "as-is", "inverted"]
    parser.add_argument("--polarity", type=polarities, default="auto", help="auto inverts dark digits on bright paper")
    fits = Literal["crop", "pad", "stretch"]
    parser.add_argument("--fit", type=fits | None, help="what is done to images of another shape: crop, pad or stretch")
    parser.add_argument("--json", action="store_true", help="for machines; no pictures unless --out is given")
    words, _ = Flags(parser.flags, switches={"--json"}, who="predict").read(parser, words)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    run = load_run(options.run, options.weights)
    if run.note:
        print(f"torchcaps: {run.note}", file=sys.stderr)
    found, refused = [], []
    for path in options.images:
        try:
            found.append(predict(run, path, options.polarity, options.fit))
        except DataError as error:
            refused.append((path, str(error)))
    out = Path(options.out).expanduser() if options.out else None if options.json else run.path / "predictions"
    names = _names(found)
    pictures = [_pictures(run, p, out, name) if out is not None else [] for p, name in zip(found, names, strict=True)]
    if options.json:
        rows = [_as_json(run, prediction, files) for prediction, files in zip(found, pictures, strict=True)]
        print(json.dumps(rows + [{"image": str(path), "error": problem} for path, problem in refused], indent=2))
    else:
        for prediction, files in zip(found, pictures, strict=True):
            _show(run, prediction, files)
    for _, problem in refused[:-1]:
        print(f"torchcaps: {problem}", file=sys.stderr)
    if refused:
        raise DataError(refused[-1][1])


def _names(found: list[Prediction]) -> list[str]:
    """Return a name for the pictures of each file; files of one name get numbers."""
    names: list[str] = []
    for prediction in found:
        stem, number = prediction.path.stem, 1
        while (name := stem if number == 1 else f"{stem}-{number}") in names:
            number += 1
        names.append(name)
    return names


def _pictures(run: Trained, prediction: Prediction, out: Path, name: str) -> list[Path]:
    """Write what the network saw and made of it, and the reconstruction by itself."""
    files = [out / f"{name}.png"]
    draw_prediction(prediction, run.classes, files[0])
    if prediction.reconstruction is not None:
        files.append(out / f"{name}-reconstruction.png")
        write_image(prediction.reconstruction, files[1])
    return files


def _show(run: Trained, prediction: Prediction, files: list[Path]) -> None:
    words = " and ".join(prediction.classes) or "none of the classes"
    print(f"{prediction.path}: {words}" + (f"  ({prediction.note})" if prediction.note else ""))
    order = sorted(range(len(run.classes)), key=lambda n: -prediction.scores[n])
    shown = sorted(order[:SHOWN]) if len(run.classes) <= SHOWN else order[:SHOWN]
    width = max(len(run.classes[n]) for n in shown)
    for n in shown:
        score = prediction.scores[n]
        bar = "█" * round(BAR * min(1.0, max(0.0, score)))
        print(f"  {run.classes[n]:>{width}} {score:6.3f} {bar}")
    if files:
        print(f"  {', '.join(map(str, files))}")


def _as_json(run: Trained, prediction: Prediction, files: list[Path]) -> dict[str, Any]:
    return {
        "image": str(prediction.path),
        "classes": list(prediction.classes),
        "scores": dict(zip(run.classes, prediction.scores, strict=True)),
        "note": prediction.note,
        "pictures": [str(path) for path in files],
    }
