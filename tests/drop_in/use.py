"""Use each added file by name in Python and on the command line, then run the tests of its kind."""

import sys
from pathlib import Path

import pytest
import torch

import torchcaps
from torchcaps.analysis import Subject, list_analyses, run_analysis
from torchcaps.cli import main
from torchcaps.data import Loader, create_dataset
from torchcaps.models import DropIn2026
from torchcaps.nn import ConvCapsules
from torchcaps.routing import DropIn
from torchcaps.training import run

# Small enough for a step of training; drawing would take longer than everything else.
SMALL = ["--width", "4", "--steps", "1", "--batch-size", "16", "--max-train-images", "16", "--max-test-images", "16"]
run.draw_run = lambda *_: []


def use_routing() -> None:
    assert "drop_in" in torchcaps.list_routings()
    layer = ConvCapsules(2, 4, 3, 4, 3, routing="drop_in")
    assert layer.routing == DropIn()
    assert layer(torch.rand(1, 4, 4, 2, 4)).pose.shape == (1, 2, 2, 3, 4)
    main(["train", "capsnet_small", *SMALL, "--routing", "drop_in", "--routing.gain", "false", "--out", "routing"])


def use_model() -> None:
    model = torchcaps.create_model("dropin2026_digits", classes=3)
    assert type(model.spec) is DropIn2026
    assert torchcaps.list_models("dropin*") == ["dropin2026_digits"]
    assert model(torch.rand(2, 1, 28, 28)).scores.shape == (2, 3)
    main(["show", "dropin2026_digits"])
    main(["train", "dropin2026_digits", *SMALL, "--out", "model"])


def use_dataset() -> None:
    assert "bars" in torchcaps.list_datasets()
    assert int(create_dataset("bars", "test", brightness=90).get_batch(torch.arange(4)).images.max()) == 90
    main(["data", "list"])
    main(["data", "check", "bars"])
    main(["data", "sample", "bars", "--brightness", "90", "--out", "grid.png"])
    main(["train", "capsnet_small", "--data", "bars", *SMALL, "--out", "dataset"])


def use_analysis() -> None:
    assert "darkness" in list_analyses()
    model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    loader = Loader(create_dataset("digits", "test").subset(torch.arange(4)), 4)
    report = run_analysis("darkness", Subject("small", model, loader), factor=0.1)
    assert (report.summary.n_images, report.options.factor) == (4, 0.1)
    main(["analyze", "model", "darkness", "--factor", "0.2", "--out", "figure.png"])


def run_tests() -> int:
    """Run the tests of routings, models, data sets and analyses for the added files only.

    Of the routing with a bug only those that the arguments of this script name.
    """
    from tests.models import narrow
    from tests.models.write_tables import main as write_tables

    write_tables()
    narrow.GRAPH_KEYS.append(narrow.paper)  # so that the sample contains the added model, the only one of its paper
    files = ["tests/contract", "tests/models", "tests/data/test_datasets.py", "tests/analysis/test_registry.py"]
    added = f"dropin2026 or bars or darkness or drop_in and (not drop_in_bug or {' or '.join(sys.argv[1:])})"
    words = ["-v", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--tb", "short"]
    return pytest.main([*words, "-k", f"({added}) and not compiled", *files])  # Inductor compiles for seconds


if __name__ == "__main__":
    assert Path(torchcaps.__file__).is_relative_to(Path.cwd()), torchcaps.__file__
    torch.set_num_threads(1)
    for use in (use_routing, use_model, use_dataset, use_analysis):
        use()
    sys.exit(run_tests())
