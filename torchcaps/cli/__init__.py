"""Command line ``torchcaps``, one module per command.

A command is a function of the arguments behind its name. Errors are one line on standard error and an exit code, see
`torchcaps.cli.console.ExitCode`.
"""

import importlib.util
import sys

for package in ("jsonargparse", "rich"):
    if importlib.util.find_spec(package) is None:
        print(f"torchcaps: the command line needs {package}: pip install 'torchcaps[train]'", file=sys.stderr)
        sys.exit(2)  # ExitCode.USAGE, which can't be imported without these packages

from torchcaps.cli.main import main  # noqa: E402, after the check of its dependencies

__all__ = ["main"]
