"""The command line: ``torchcaps list``, ``show`` and ``data``.

Each command is a function that takes the words after its name and prints. What a user did wrong is said in one sentence
on standard error, with a non-zero exit.
"""

import sys

try:
    import jsonargparse  # noqa: F401
    import rich  # noqa: F401
except ImportError as missing:
    sys.exit(f"torchcaps: the command line needs {missing.name}: pip install 'torchcaps[cli]'")

from torchcaps.cli.main import main

__all__ = ["main"]
