import os

import pytest
import torch

from tests.sampling import ALL_CASES_VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help=f"Run every case of sampled products (tests/sampling.py); {ALL_CASES_VARIABLE}=1 does the same.",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Test modules sample at collection. The variable also reaches xdist workers and test subprocesses.
    if config.getoption("--all-cases"):
        os.environ[ALL_CASES_VARIABLE] = "1"
    os.environ.pop("COLUMNS", None)  # tables are compared at full width


@pytest.fixture(autouse=True)
def deterministic_torch() -> None:
    """Use one thread (the suite itself runs on all cores) and a fixed seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
