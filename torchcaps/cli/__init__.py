"""The command line: ``torchcaps train``, ``evaluate``, ``predict``, ``list``, ``show`` and ``data``.

Each command is a function that takes the words after its name and prints. What a user did wrong is said in one sentence
on standard error, with a non-zero exit.
"""

import importlib.util
import sys

for needed in ("jsonargparse", "rich"):
    if importlib.util.find_spec(needed) is None:
        sys.exit(f"torchcaps: the command line needs {needed}: pip install 'torchcaps[cli]'")

from torchcaps.cli.main import main  # noqa: E402, what it needs is looked for first

__all__ = ["main"]
