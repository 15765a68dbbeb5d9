"""Argument checks; see tests/bad_input for their use by layers, routings, losses and models."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bad_input.rejection import check_sentence
from torchcaps._core.validation import (
    DomainError,
    FieldError,
    check_field_names,
    check_fields,
    check_finite,
    check_float,
    check_magnitude,
    check_no_nan,
    check_non_negative,
    check_range,
    join_quoted,
)


@dataclass
class Settings:
    """Fields of each checked type, and one that is not checked."""

    flag: Any = True
    count: Any = 1
    rate: Any = 0.5
    limit: Any = None
    choice: Any = "a"
    other: Any = None


Settings.__annotations__ |= {
    "flag": bool,
    "count": int,
    "rate": float,
    "limit": int | None,
    "choice": Literal["a", "b"],
    "other": list[int],
}


@pytest.mark.parametrize("fields", [{}, {"rate": 1}, {"limit": 3}, {"choice": "b"}, {"other": "unchecked"}], ids=str)
def test_valid_fields_pass(fields: dict[str, Any]) -> None:
    check_fields(Settings(**fields))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("flag", 1, TypeError),
        ("count", True, TypeError),
        ("count", 1.0, TypeError),
        ("rate", "fast", TypeError),
        ("rate", None, TypeError),
        ("rate", False, TypeError),
        ("limit", 1.5, TypeError),
        ("choice", "c", ValueError),
        ("choice", None, ValueError),
    ],
)
def test_field_of_another_type_is_rejected(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        check_fields(Settings(**{name: value}))
    check_sentence(str(raised.value), "Settings", name, repr(value))


@pytest.mark.parametrize(
    ("value", "strict", "valid"),
    [
        (None, True, True),
        (0, False, True),
        (0, True, False),
        (2, True, True),
        (2.5, False, False),
        (-1, False, False),
        (math.nan, False, False),
        (math.inf, False, False),
    ],
)
def test_check_range(value: Any, strict: bool, valid: bool) -> None:
    settings = Settings(rate=value)
    if valid:
        check_range(settings, "rate", 0, 2, strict)
        return
    with pytest.raises(FieldError, match="rate") as raised:
        check_range(settings, "rate", 0, 2, strict)
    assert (raised.value.owner, raised.value.field) == ("Settings", "rate")
    assert str(raised.value) == f"Settings: rate {raised.value.problem}"
    check_sentence(str(raised.value), "Settings", "rate", str(value), "0", "2")


def test_infinity_is_in_an_unbounded_range() -> None:
    check_range(Settings(rate=math.inf), "rate", 0)


def test_unknown_field_names_are_rejected() -> None:
    check_field_names(Settings, ["flag", "rate"])
    with pytest.raises(ValueError, match="'speed'") as raised:
        check_field_names(Settings, ["flag", "speed"], "my settings")
    check_sentence(str(raised.value), "my settings", "'speed'", "'flag'", "'other'")


def test_join_quoted() -> None:
    assert join_quoted(["a"]) == "'a'"
    assert join_quoted(["a", "b", "c"], "and") == "'a', 'b' and 'c'"


def test_check_float() -> None:
    check_float(torch.zeros(1), "x")
    for value, mention in ((torch.zeros(1).long(), "torch.int64"), ([0.0], "list")):
        with pytest.raises(TypeError) as raised:
            check_float(value, "x")
        check_sentence(str(raised.value), "x", mention)


def test_check_finite_accepts_sums_that_overflow() -> None:
    check_finite(torch.full((4,), 3e38), "x")
    check_finite(None, "x")
    check_finite(torch.full((4,), math.nan, device="meta"), "x")


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.inf, 1.0, 1.0], [math.inf, -math.inf, 1.0]], ids=str)
def test_check_finite_counts_non_finite_values(values: list[float]) -> None:
    n_bad = sum(not math.isfinite(value) for value in values)
    with pytest.raises(ValueError, match="x") as raised:
        check_finite(torch.tensor(values), "x")
    check_sentence(str(raised.value), "x", str(n_bad), "3")


def test_check_no_nan_accepts_infinities() -> None:
    check_no_nan(torch.tensor([math.inf, -math.inf]), "x")
    with pytest.raises(ValueError, match="NaN") as raised:
        check_no_nan(torch.tensor([math.nan, 1.0]), "x")
    check_sentence(str(raised.value), "x", "1", "2")


def test_check_non_negative() -> None:
    for valid in (None, torch.zeros(2), torch.zeros(0)):
        check_non_negative(valid, "x")
    with pytest.raises(ValueError, match="x") as raised:
        check_non_negative(torch.tensor([1.0, -0.5]), "x")
    check_sentence(str(raised.value), "x", "-0.5")


def test_values_are_not_checked_in_a_compiled_graph() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        check_finite(x, "x")
        check_no_nan(x, "x")
        check_non_negative(x, "x")
        return x + 1

    compiled = torch.compile(checked, fullgraph=True, backend="eager")
    assert math.isnan(float(compiled(torch.tensor(math.nan))))


def change_in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] = 1e9


def replace_data(weight: torch.nn.Parameter) -> None:
    weight.data = torch.full((3,), 1e9)


def step_optimizer(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.full((3,), -1e9)
    torch.optim.SGD([weight], lr=1.0).step()


@pytest.mark.parametrize("change", [change_in_place, replace_data, step_optimizer])
def test_magnitude_of_a_parameter_is_read_again_after_a_change(change: Callable[[torch.nn.Parameter], None]) -> None:
    weight, pose = torch.nn.Parameter(torch.ones(3)), torch.ones(2)
    check_magnitude(1e6, "votes", "pose or weight", weight, pose)
    change(weight)
    with pytest.raises(DomainError, match=r"1\.0e\+09"):
        check_magnitude(1e6, "votes", "pose or weight", weight, pose)


def test_magnitude_of_an_unchanged_parameter_is_read_once() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    reads = CountAminmax()
    with reads:
        for _ in range(3):
            check_magnitude(1e6, "votes", "weight", weight)
    assert reads.count == 1


class CountAminmax(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.aminmax.default
        return function(*args, **(kwargs or {}))
