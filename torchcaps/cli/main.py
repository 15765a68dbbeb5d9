"""Which command is meant, and what becomes of its errors."""

import sys
from collections.abc import Callable

import torchcaps
from torchcaps.cli.data import data_command
from torchcaps.cli.models import list_command, show_command
from torchcaps.fields import known_name

__all__ = ["main"]

HELP = """\
usage: torchcaps COMMAND ...

  list    the models, with paper, data, parameters and routing
  show    one model's layers, what they cost, and the memory that training it takes
  data    the data sets: which there are, fetch one, check its files, draw a page of it

'torchcaps COMMAND --help' says more, 'torchcaps show MODEL --help' what can be changed in a model. For example:

  torchcaps list tsai
  torchcaps show sabour2017_mnist --image 3x64x64 --classes 196
  torchcaps data sample multimnist --source digits --out grid.png
"""


def main(words: list[str] | None = None) -> None:
    """Run a command."""
    words = sys.argv[1:] if words is None else words
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": list_command,
        "show": show_command,
        "data": data_command,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if words[0] == "--version":
        print(f"torchcaps {torchcaps.__version__}")
        return
    try:
        commands[known_name(words[0], commands, "the command")](words[1:])
    except (ValueError, TypeError) as error:
        sys.exit(f"torchcaps: {error}")
    except KeyboardInterrupt:
        sys.exit("torchcaps: stopped")
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has seen enough
