"""Results on disk: whole or not at all, with the command, the time and the machine."""

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.files import move_into_place, staging_directory

__all__ = ["write_record"]


def write_record(path: Path, module: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a benchmark with how they came about."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    words = sys.argv[1:]
    command = " ".join(["torchcaps", *words] if module.startswith("torchcaps") else [f"python -m {module}", *words])
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"command": command, "seed": 0, "when": when, "machine": machine, "rows": rows}
    with staging_directory(path.parent, sweep=False) as own:
        (own / path.name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        move_into_place(own / path.name, path)
    print(f"recorded in {path}")
