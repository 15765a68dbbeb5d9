"""Results on disk: whole or not at all, with the command, the time and the machine."""

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["write_record", "write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


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
    write_whole(path, json.dumps(record, indent=2) + "\n")
    print(f"recorded in {path}")
