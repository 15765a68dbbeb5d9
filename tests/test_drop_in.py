"""A routing, a model, a data set and an analysis, each added as one file, work by name and are tested."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import all_cases

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "tests/drop_in"

# A routing with a bug, images of a batch depend on each other, and without reference loops.
BUG = (("class DropIn(", "class DropInBug("), ("return State(", "total = total - total.mean(0)\n        return State("))

# Tests that must have run for the added files, and those that must have failed for the routing with the bug.
ROUTING_TESTS = {
    "test_every_routing_has_reference_loops",
    "test_values_equal_reference",
    "test_gradients_equal_finite_differences_of_reference",
    "test_values_and_gradients_are_finite",
    "test_image_is_independent_of_its_batch",
    "test_parents_are_invariant_to_the_order_of_children",
    "test_permuted_weights_permute_parents",
    "test_couplings_sum_to_one_over_the_axis_of_the_paper_only",
}
MODEL_TESTS = {
    "test_registered_counts",
    "test_layers_and_recipe_match_the_snapshot",
    "test_loss_decreases_and_every_parameter_has_a_gradient",
    "test_models_overfit_eight_images",
    "test_other_image_sizes_give_finite_scores",
    "test_compile_to_a_single_graph",
    "test_export_with_dynamic_batch_size",
    "test_half_precision",
}
DATASET_TESTS = {
    "test_shape_classes_and_size_agree_with_the_spec",
    "test_image_depends_on_its_index_only",
    "test_images_vary_and_all_classes_can_occur",
    "test_subset_and_loader",
}
ANALYSIS_TESTS = {"test_every_declaration_is_complete"}
FAILING = {"test_image_is_independent_of_its_batch", "test_every_routing_has_reference_loops"}


def make_project(path: Path) -> Path:
    """Copy the package and the tests, with compiled files, and add one file per kind."""
    for folder in ("torchcaps", "tests"):
        shutil.copytree(ROOT / folder, path / folder)
    shutil.copy(ROOT / "pyproject.toml", path)
    routing = (EXAMPLES / "routing.py").read_text()
    (path / "torchcaps/routing/drop_in.py").write_text(routing)
    for old, new in BUG:
        assert routing.count(old) == 1
        routing = routing.replace(old, new)
    (path / "torchcaps/routing/drop_in_bug.py").write_text(routing)
    shutil.copy(EXAMPLES / "reference.py", path / "tests/reference/drop_in.py")
    shutil.copy(EXAMPLES / "model.py", path / "torchcaps/models/dropin2026.py")
    shutil.copy(EXAMPLES / "dataset.py", path / "torchcaps/data/datasets/bars.py")
    shutil.copy(EXAMPLES / "analysis.py", path / "torchcaps/analysis/darkness.py")
    return path


@pytest.mark.skipif(not all_cases(), reason="runs hundreds of tests on the added files: runs with --all-cases")
@pytest.mark.timeout(1_200)  # many tests in one process, which takes long on a busy machine
def test_one_file_adds_a_routing_a_model_a_data_set_and_an_analysis(tmp_path: Path) -> None:
    """In one process: Python, command line, and the tests of every routing, model, data set and analysis."""
    project = make_project(tmp_path / "project")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.drop_in.use", *sorted(FAILING)]
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    output = run.stdout[-5000:] + run.stderr[-3000:]
    assert run.returncode == 1, output  # tests of the routing with the bug fail
    results = re.findall(r"^\S+::(test_\w+)\[(\S*)\] (PASSED|FAILED|ERROR)", run.stdout, re.MULTILINE)
    failed = {(test, case) for test, case, result in results if result != "PASSED"}
    assert {(test, case) for test, case in failed if "drop_in_bug" not in case} == set(), output
    assert {test for test, _ in failed} == FAILING
    for name, tests in (
        ("drop_in", ROUTING_TESTS),
        ("dropin2026_digits", MODEL_TESTS),
        ("bars", DATASET_TESTS),
        ("darkness", ANALYSIS_TESTS),
    ):
        passed = {test for test, case, result in results if name in case and result == "PASSED"}
        assert tests - passed == set(), name
    for path in ("routing", "model", "dataset", "grid.png", "figure.png"):
        assert (project / path).exists(), path
