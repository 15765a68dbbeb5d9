"""Images for a trained run, on the command line: its own, or others by ``--data``."""

import dataclasses
from typing import Any

from torchcaps.cli.parser import Parser, described, kind_of
from torchcaps.data import Dataset
from torchcaps.data.registry import create_dataset, find_spec, is_image_folder
from torchcaps.training.inference import Trained
from torchcaps.training.setup import open_test

__all__ = ["BELOW", "add_data_flags", "chosen_images"]

BELOW = {"--data.": "--data-options."}  # what the flags of a data set begin with, and what the parser calls it


def add_data_flags(parser: Parser, words: list[str]) -> None:
    """Add ``--data``, ``--split`` and ``--data-dir``, and the fields of the data set that the words name."""
    parser.add_argument("--data", type=str | None, help="another data set, or a folder of images")
    parser.add_argument("--split", default="test", help="which part of it")
    parser.add_argument("--data-dir", type=str | None, help="the data folder (default: the run's, else TORCHCAPS_DATA)")
    data = next((w for b, w in zip(["", *words], words, strict=False) if b == "--data"), None)
    data = data or next((w.partition("=")[2] for w in words if w.startswith("--data=")), None)
    spec = None if data is None else find_spec("folder") if is_image_folder(data) else find_spec(data)
    for field in dataclasses.fields(spec) if spec is not None else ():
        text = described(type(spec), field.name)
        parser.add_argument(f"--data-options.{field.name}", type=kind_of(spec, field.name) | None, help=text)
    parser.shown = {longer: short for short, longer in BELOW.items()}


def chosen_images(run: Trained, options: Any, split: str | None = None) -> Dataset:
    """Open the images that the flags name, by default the run's test images; ``split`` goes before ``--split``."""
    spec = run.spec
    part: str = split or options.split
    if options.data_dir is not None:
        spec = dataclasses.replace(spec, data_dir=options.data_dir)
    if options.data is None and part == "test":
        found = open_test(spec)
        if found is None:
            raise ValueError(f"{run.path} has no test images: give some by --data")
        return found
    used = dict(spec.data_options)
    if options.data is not None:
        used = {k: v for k, v in dict(options.get("data_options") or {}).items() if v is not None}
    name = options.data or spec.recipe.data
    folder = is_image_folder(name)
    return create_dataset(name, part, None if folder else spec.data_dir, **used)
