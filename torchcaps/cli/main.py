"""Which command is meant, and what becomes of its errors."""

import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import torchcaps
from torchcaps._core.registry import check_name

__all__ = ["main"]

HELP = """\
usage: torchcaps COMMAND ...

  train      a model on a data set, or on a folder of your own images; by default a small one on real digits
  evaluate   one run, or several together, on its test images or on others
  predict    the class of image files, with what the network makes of them
  analyze    what a trained network knows: perturbation, reconstruction, affine, attack, ... as a figure
  list       the models, with paper, data, parameters and routing
  show       one model's layers, what they cost, and the memory that training it takes
  bench      how fast layers and models are, beside the usual way to write them and beside their arithmetic
  reproduce  a table or figure of one of the five papers, beside what was published
  report     all tables and figures that were run, as one page
  data       the data sets: which there are, fetch one, check its files, draw a page of it

'torchcaps COMMAND --help' says more, 'torchcaps train MODEL --help' what can be changed in a model. For example:

  torchcaps train
  torchcaps train sabour2017_mnist --max-minutes 30
  torchcaps train ./my_images
  torchcaps predict runs/capsnet_small-digits-1 photo.png
  torchcaps analyze runs/capsnet_small-digits-1 perturbation --out fig.png
  torchcaps reproduce sabour2017 table1 --scale cpu
  torchcaps data sample multimnist --source digits --out grid.png
"""

TRAIN_HELP = Path(__file__).with_name("train_help.txt")  # written by tools/help.py

# Where each command lives: torch is loaded by those that need it.
COMMANDS = {
    "analyze": ("torchcaps.cli.analyze", "analyze_command"),
    "bench": ("torchcaps.cli.bench", "bench_command"),
    "data": ("torchcaps.cli.data", "data_command"),
    "evaluate": ("torchcaps.cli.evaluate", "evaluate_command"),
    "list": ("torchcaps.cli.show", "list_command"),
    "predict": ("torchcaps.cli.predict", "predict_command"),
    "report": ("torchcaps.cli.reproduce", "report_command"),
    "reproduce": ("torchcaps.cli.reproduce", "reproduce_command"),
    "show": ("torchcaps.cli.show", "show_command"),
    "train": ("torchcaps.cli.train", "train_command"),
}


def main(words: list[str] | None = None) -> None:
    """Run a command. What a user did wrong ends with 2, what went wrong with 1."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if words[0] == "--version":
        print(f"torchcaps {torchcaps.__version__}")
        return
    if words in (["train", "--help"], ["train", "-h"]):  # at once: loading torch would take longer than reading it
        print(TRAIN_HELP.read_text(encoding="utf-8"), end="")
        sys.exit(0)
    try:
        module, name = COMMANDS[check_name(words[0], COMMANDS, "the command")]
        getattr(importlib.import_module(module), name)(words[1:])
    except (ValueError, TypeError) as error:
        _leave(str(error), 2)
    except BrokenPipeError:  # whoever read, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may what is left raise at the end
        sys.exit(0)
    except KeyboardInterrupt:
        _leave("stopped", 130)


def _leave(message: str, code: int) -> NoReturn:
    print(f"torchcaps: {message}", file=sys.stderr)
    sys.exit(code)
