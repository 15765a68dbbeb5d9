"""Requests generated from the OpenAPI description: the server answers each with 2xx or 4xx and keeps running."""

import contextlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
import torch
from schemathesis.checks import not_a_server_error

from tests.explorer.helpers import request, small_run
from tests.explorer.live import running
from tests.sampling import all_cases
from torchcaps.explorer import create_app

N_CASES = 500 if all_cases() else 4  # per operation
TIMEOUT_S = 120  # of one request, on a busy machine
OPERATIONS = (
    ("GET", "/api/info"),
    ("GET", "/api/training"),
    ("GET", "/api/statistics"),
    ("GET", "/api/samples"),
    ("POST", "/api/forward"),
    ("POST", "/api/parent"),
    ("POST", "/api/credit"),
    ("POST", "/api/decode"),
    ("POST", "/api/upload"),
)


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    torch.set_flush_denormal(False)  # a training in the same process sets it, and hypothesis needs subnormal numbers
    with running([small_run()], statistics=False) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operation_survives(schema: Any, method: str, path: str) -> None:
    """Valid and invalid requests: no 5xx, and responses as described."""
    operation = schema[path][method]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=N_CASES // 2,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def survives(case: Any) -> None:
            response = case.call(timeout=TIMEOUT_S)
            case.validate_response(response, checks=[not_a_server_error])
            assert response.status_code < 500
            if response.status_code >= 400:
                assert "\n" not in response.json()["error"]

        # A request without parameters can't be invalid.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            survives()


def test_description_lists_every_operation() -> None:
    description = request(create_app([small_run()], statistics=False), "GET", "/openapi.json").json()
    listed = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert listed == set(OPERATIONS)
