"""Settings and results as plain values."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps._core.serialize import (
    from_plain,
    is_identity,
    is_resumable,
    non_default,
    result_from_dict,
    result_to_dict,
    setting,
    to_json,
    to_plain,
)
from torchcaps.models.recipe import OptimizerConfig
from torchcaps.models.schedules import OneCycle
from torchcaps.routing import EM, Dynamic, Routing


@dataclass(frozen=True)
class Inner:
    """A nested setting."""

    size: int = 3
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    """A setting with every kind of field."""

    rate: float
    routing: Routing = Dynamic()
    inner: Inner = Inner()
    sizes: tuple[int, ...] = (1, 2)
    several: tuple[Inner, ...] | None = None
    options: dict[str, Any] = setting(default_factory=dict, identity=False)
    steps: int = setting(10, resumable=True)


@dataclass(frozen=True)
class OtherDefault(Outer):
    """A subclass that changes a default."""

    steps: int = 20


SPEC = Outer(0.5, EM(2), Inner(7, "x"), (4,), (Inner(1), Inner(2)), {"a": 1, "b": [True, None]})


def test_plain_values_round_trip() -> None:
    plain = to_plain(SPEC)
    assert plain["routing"]["class_path"] == "torchcaps.routing.EM"
    assert plain["several"] == [{"size": 1, "name": None}, {"size": 2, "name": None}]
    assert from_plain(Outer, plain) == SPEC


def test_missing_fields_take_their_default() -> None:
    assert from_plain(Outer, {"rate": 1.0}) == Outer(1.0)


@pytest.mark.parametrize(
    ("annotation", "value", "mention"),
    [
        (Outer, {"rate": 1.0, "speed": 2}, "'speed'"),
        (Outer, [1.0], r"Outer.*\[1.0\]"),
        (Routing, {"class_path": "pathlib.Path"}, "pathlib.Path"),
        (Routing, {"class_path": "torchcaps.routing.Nothing"}, "Nothing"),
    ],
)
def test_invalid_plain_values_are_rejected(annotation: Any, value: Any, mention: str) -> None:
    with pytest.raises(ValueError, match=mention):
        from_plain(annotation, value)


def test_other_objects_are_not_plain() -> None:
    with pytest.raises(TypeError, match="tensor"):
        to_plain({"a": torch.zeros(1)})


def test_non_default_omits_defaults_at_every_level() -> None:
    assert non_default(Outer(0.5)) == {"rate": 0.5}
    assert non_default(Outer(0.5, EM(), Inner(4))) == {"rate": 0.5, "routing": {"class": "EM"}, "inner": {"size": 4}}
    assert non_default(Outer(0.5, Dynamic(2)))["routing"] == {"class": "Dynamic", "iterations": 2}
    assert non_default(Outer(0.5, options={"a": 1})) == {"rate": 0.5, "options": {"a": 1}}


def test_flags_of_settings() -> None:
    flags = {field.name: (is_identity(Outer, field.name), is_resumable(Outer, field.name)) for field in FIELDS}
    default = (True, False)
    assert flags == {field.name: default for field in FIELDS} | {"options": (False, False), "steps": (True, True)}
    assert is_resumable(OtherDefault, "steps")  # inherited, although the field is declared again


FIELDS = dataclasses.fields(Outer)


def test_json_of_results() -> None:
    value = {1: torch.tensor([[1, 2]]), "scalar": torch.tensor(0.5), "path": Path("a/b"), "inner": (Inner(), None)}
    expected = {"1": [[1, 2]], "scalar": 0.5, "path": "a/b", "inner": [{"size": 3, "name": None}, None]}
    assert to_json(value) == expected


@dataclass
class Result:
    """A result with tensors and tuples."""

    values: Tensor
    labels: Tensor
    shape: tuple[tuple[int, ...], ...]
    name: str


def test_results_round_trip_with_a_prefix() -> None:
    result = Result(torch.tensor([0.5, 1.0]), torch.tensor([1, 2]), ((1, 2), (3,)), "x")
    values = to_json(result_to_dict(result, "affine_"))
    assert set(values) == {"affine_values", "affine_labels", "affine_shape", "affine_name"}
    again = result_from_dict(Result, values, "affine_")
    torch.testing.assert_close((again.values, again.labels), (result.values, result.labels))
    assert (again.values.dtype, again.labels.dtype) == (torch.float32, torch.int64)
    assert (again.shape, again.name) == (result.shape, result.name)


@dataclass
class ExtendedResult:
    """A result with a field that older records lack."""

    name: str
    mask: Tensor | None = None


def test_records_without_a_later_field_have_its_default() -> None:
    assert result_from_dict(ExtendedResult, {"name": "x"}) == ExtendedResult("x")
    again = result_from_dict(ExtendedResult, {"name": "x", "mask": [[True, False]]})
    torch.testing.assert_close(again.mask, torch.tensor([[True, False]]))
    with pytest.raises(KeyError, match="name"):
        result_from_dict(ExtendedResult, {})


def test_a_class_of_another_kind_than_the_setting_is_rejected() -> None:
    schedule = to_plain(OneCycle())
    with pytest.raises(ValueError, match="OneCycle must be OptimizerConfig"):
        from_plain(OptimizerConfig, schedule)
    with pytest.raises(ValueError, match="OneCycle must be Routing or str"):
        from_plain(Routing | str, schedule)
    assert from_plain(Any, schedule) == OneCycle()
