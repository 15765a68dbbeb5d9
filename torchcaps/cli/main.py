"""Entry point of ``torchcaps``: dispatch to a command, and exit codes."""

import importlib
import os
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NoReturn

from torchcaps._core.version import __version__

__all__ = ["main"]

HELP = """\
usage: torchcaps COMMAND ...
       torchcaps --help | --version

  train      train a model on a data set or on a directory of images; by default a small one on embedded digits
  evaluate   accuracy and loss of a run, of an ensemble of runs or of an ONNX file, on its test set or another data set
  predict    class, scores and reconstruction of image files, or of all images in a directory
  export     write the network of a run to ONNX or a torch.export program, checked against it; quantisation
  convert    convert a CapsNet trained in Keras or TensorFlow to ONNX
  audit      checks of a run, a model or any torch.nn.Module for the known mistakes of capsule networks
  analyze    analyses of trained runs: perturbation, reconstruction, affine, attack, ... with a figure
  explore    web page that shows what a trained network makes of an image that you draw, pick or upload
  list       table of the models: paper, data set, parameters, routing
  show       layers of a model, with parameters, multiply-adds and training memory
  bench      speed and memory of layers and models, compared with a naive baseline
  reproduce  train and measure a table or figure of one of the papers, next to the published values
  report     one page with all reproduced tables and figures
  data       data sets: list, download, check, and draw samples
  completion print the completion script of a shell: bash, zsh or fish

'torchcaps COMMAND --help' lists the flags of a command, 'torchcaps train MODEL --help' includes those of a model.

exit codes: 0 success; 1 the run failed; 2 invalid usage or input; 128 + n stopped by signal n (130 Ctrl-C, 143 TERM)

examples:
  torchcaps train
  torchcaps train sabour2017_mnist --max-minutes 30
  torchcaps train ./my_images
  torchcaps predict runs/capsnet_digits-digits-1 photo.png
  torchcaps analyze runs/capsnet_digits-digits-1 perturbation --out fig.png
  torchcaps reproduce sabour2017 table1 --scale cpu
  torchcaps data sample multimnist --source digits --out grid.png
"""

HELP_INDENT = 13  # column of the descriptions of the commands
UNLIMITED_WIDTH = 400  # columns of help that is not printed on a terminal

TRAIN_HELP = Path(__file__).with_name("train_help.txt")  # written by tools/help.py
TRAIN_HELP_WIDTH = 80  # columns of that file

# Module and function of each command; imported on use, since most load torch.
COMMANDS = {
    "analyze": ("torchcaps.cli.analyze", "analyze_command"),
    "audit": ("torchcaps.cli.audit", "audit_command"),
    "bench": ("torchcaps.cli.bench", "bench_command"),
    "completion": ("torchcaps.cli.completion", "completion_command"),
    "convert": ("torchcaps.cli.convert", "convert_command"),
    "data": ("torchcaps.cli.data", "data_command"),
    "evaluate": ("torchcaps.cli.evaluate", "evaluate_command"),
    "explore": ("torchcaps.cli.explore", "explore_command"),
    "export": ("torchcaps.cli.export", "export_command"),
    "list": ("torchcaps.cli.show", "list_command"),
    "predict": ("torchcaps.cli.predict", "predict_command"),
    "report": ("torchcaps.cli.reproduce", "report_command"),
    "reproduce": ("torchcaps.cli.reproduce", "reproduce_command"),
    "show": ("torchcaps.cli.show", "show_command"),
    "train": ("torchcaps.cli.train", "train_command"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command; the exit codes are those of `torchcaps.cli.console.ExitCode`.

    Args:
        arguments: name of the command and its arguments; default: those of the process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        os.environ["PYTHONSAFEPATH"] = "1"  # Python processes that libraries start don't search the current directory
        warnings.showwarning = _show_warning
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_wrapped_help(), end="")
        return
    if arguments[0] in ("--version", "-V"):
        print(f"torchcaps {__version__}")
        return
    is_wide = shutil.get_terminal_size().columns >= TRAIN_HELP_WIDTH
    if arguments in (["train", "--help"], ["train", "-h"]) and is_wide:  # loading torch takes longer than reading it
        print(TRAIN_HELP.read_text(encoding="utf-8"), end="")
        sys.exit(0)
    from torchcaps.cli.console import ExitCode, exit_code_of

    try:
        module, name = COMMANDS[_check_command(arguments[0])]
        getattr(importlib.import_module(module), name)(arguments[1:])
    except (ValueError, TypeError) as error:
        _exit(str(error), exit_code_of(error))
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # output at exit must not raise again
        sys.exit(ExitCode.OK)
    except OSError as error:  # of a file that a command opens without a sentence of its own
        from torchcaps._core.files import reason_of

        name = f"{error.filename}: " if error.filename else ""
        _exit(f"{name}{reason_of(error)}", ExitCode.FAILURE)
    except KeyboardInterrupt:
        _exit("interrupted", ExitCode.INTERRUPTED)


def _wrapped_help() -> str:
    """Return the help, wrapped at the width of the terminal; examples stay on one line, to be copied."""
    width = shutil.get_terminal_size((UNLIMITED_WIDTH, 24)).columns
    text, heading, examples = HELP.partition("examples:\n")
    lines = []
    for line in text.splitlines():
        indent = " " * (HELP_INDENT if line.startswith("  ") else 2)
        options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
        lines += textwrap.wrap(line, max(width, 2 * HELP_INDENT), **options) or [""]
    return "\n".join(lines) + "\n" + heading + examples


def _check_command(name: str) -> str:
    """Return the name of a command; raise a ValueError that suggests similar ones if it is unknown."""
    if name in COMMANDS:
        return name
    if name.startswith("-"):
        raise ValueError(f"unknown flag {name}: flags follow the command, as in 'torchcaps list {name}'")
    from torchcaps._core.registry import check_name

    return check_name(name, COMMANDS, "command", max_shown=len(COMMANDS))


def _show_warning(message: object, *_: object) -> None:
    from torchcaps.cli.console import print_warning

    print_warning(message)


def _exit(message: str, code: int) -> NoReturn:
    """Print a message on stderr and exit with this code."""
    from torchcaps.cli.console import escape_control

    print(f"torchcaps: {escape_control(message)}", file=sys.stderr)
    sys.exit(code)
