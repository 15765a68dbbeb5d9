"""The explorer: a web page that shows what a trained network makes of an image (``torchcaps explore``).

Needs the extras ``train`` and ``explore``. Nothing in this package is imported by ``import torchcaps``.
"""

from torchcaps.explorer.app import create_app
from torchcaps.explorer.export import export_page
from torchcaps.explorer.server import serve
from torchcaps.explorer.session import ExploredRun, load_pretrained_run

__all__ = ["ExploredRun", "create_app", "export_page", "load_pretrained_run", "serve"]
