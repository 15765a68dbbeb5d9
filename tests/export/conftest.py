import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.training.conftest import here, no_figures, registered_run, restored_registries
from torchcaps.cli import main

__all__ = ["exported", "here", "no_figures", "registered_run", "restored_registries"]


@pytest.fixture(scope="session")
def exported(registered_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file with trace, exported from a run by the command. Copy it to change it."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    options = ["--out", str(path), "--trace", "--quantize", "float16", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        main(["export", str(registered_run), *options])
    report = json.loads(stdout.getvalue())
    assert report["largest_difference"] < 1e-5
    assert report["outputs"][:3] == ["scores", "capsules", "reconstruction"]
    assert [row["n"] for row in report["files"]] == [10, 10]  # max_test_images of the run
    assert report["files"][0]["bytes"] == path.stat().st_size > 1.5 * report["files"][1]["bytes"]
    return path
