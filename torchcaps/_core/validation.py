"""Argument checks: dataclass fields against their annotations, numeric ranges, and tensors."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchcaps._core.values import check_value, is_host, is_readable

__all__ = [
    "DomainError",
    "FieldError",
    "FieldTypeError",
    "check_field_names",
    "check_fields",
    "check_finite",
    "check_float",
    "check_magnitude",
    "check_no_nan",
    "check_non_negative",
    "check_range",
    "escape_control",
    "is_unicode",
    "join_quoted",
    "type_hints",
]


class FieldError(ValueError):
    """A field of a dataclass has an invalid value.

    Args:
        owner: instance whose field it is.
        field: name of the field.
        problem: the rest of the sentence: what is accepted, and the value.

    Attributes:
        owner: name of the instance's class.
    """

    def __init__(self, owner: Any, field: str, problem: str) -> None:
        self.owner, self.field, self.problem = type(owner).__name__, field, problem
        super().__init__(f"{self.owner}: {field} {problem}")


class FieldTypeError(TypeError):
    """A field of a dataclass has a value of another type; arguments and attributes as those of `FieldError`."""

    def __init__(self, owner: Any, field: str, problem: str) -> None:
        self.owner, self.field, self.problem = type(owner).__name__, field, problem
        super().__init__(f"{self.owner}: {field} {problem}")


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a class. Evaluating them takes up to a millisecond."""
    return typing.get_type_hints(cls)


def check_fields(owner: Any) -> None:
    """Check each field of a dataclass instance against its annotation (Literal, bool, int, float, None).

    Fields of other types are checked by the owner.
    """
    hints = type_hints(type(owner))
    for field in dataclasses.fields(owner):
        _check_field(owner, field.name, hints[field.name])


def _check_field(owner: Any, name: str, annotation: Any) -> None:
    """Raise an error if the value of a field is not of its annotated type, or not one of its literals."""
    value = getattr(owner, name)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            raise FieldError(owner, name, f"must be {join_quoted(choices)}, got {value!r}")
        return
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    if not set(options) <= {bool, int, float, type(None)}:
        return
    allowed = (*options, int) if float in options else options
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in options):
        descriptions = {bool: "True or False", int: "an int", float: "a number"}
        expected = " or ".join(descriptions.get(option, "None") for option in options)
        raise FieldTypeError(owner, name, f"must be {expected}, got {value!r}")


def check_range(owner: Any, name: str, least: float, most: float = math.inf, strict: bool = False) -> None:
    """Raise a ValueError if a numeric field is below ``least`` (or equal, if ``strict``), above ``most``, or NaN.

    ``None`` passes. Infinity passes only if ``most`` is infinite.
    """
    value = getattr(owner, name)
    if value is None or (least < value <= most if strict else least <= value <= most):
        return
    bounds = f"greater than {least:g}" if strict else f"at least {least:g}"
    bounds += "" if most == math.inf else f" and at most {most:g}"
    raise FieldError(owner, name, f"must be {bounds}, got {value}")


def check_field_names(
    cls: Any, names: Iterable[str], owner: str | None = None, synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise a ValueError if a name is not a field of the dataclass ``cls``; the message lists its fields.

    Args:
        cls: the dataclass.
        names: names to check.
        owner: subject of the message (default: name of the class).
        synonyms: for names that other libraries use, how to set the field that has their meaning.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in known:
            expected = join_quoted(known, "and") if known else "none"
            hint = f"use {synonyms[name]}; " if synonyms and name in synonyms else ""
            raise ValueError(f"{owner or cls.__name__} has no field {name!r}: {hint}its fields are {expected}")


def escape_control(text: str) -> str:
    """Return a text with control and formatting characters escaped: names from files must not control the terminal.

    >>> escape_control("red \\x1b[31m, line\\nbreak")
    'red \\\\x1b[31m, line\\\\nbreak'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON and names of files can contain but no font can draw.

    >>> is_unicode("caf\u00e9"), is_unicode("\\ud800")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def join_quoted(names: Iterable[Any], conjunction: str = "or") -> str:
    """Join names for a sentence, each quoted.

    >>> join_quoted(["l1", "l2"])
    "'l1' or 'l2'"
    """
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" {conjunction} " + quoted[-1]


def check_float(value: Any, name: str) -> None:
    """Raise a TypeError if a value is not a floating-point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {kind}")


def check_finite(tensor: Tensor | None, name: str) -> None:
    """Raise a ValueError if a tensor contains NaN or infinities, which routing would spread over every parent.

    Costs one pass over the children, far less than the votes. Skipped if values can't be read; deferred on an
    accelerator: see `torchcaps._core.values`.
    """
    if tensor is None or not is_readable(tensor):
        return
    tensor = tensor.detach()
    if is_host(tensor.device) and math.isfinite(tensor.sum().item()):
        return  # one pass; a non-finite sum may also be an overflow, so count below
    n_values = tensor.numel()

    def describe(n_bad: float) -> Exception | None:
        text = f"{name} must be finite, got {int(n_bad)} NaN or infinite of {n_values} values"
        return ValueError(text) if n_bad else None

    check_value(lambda: (~torch.isfinite(tensor)).sum(), describe, tensor.device)


class DomainError(ValueError):
    """Finite values are so large that results or gradients could overflow."""


def check_magnitude(limit: float | None, kind: str, name: str, *factors: Tensor, scale: float = 1.0) -> None:
    """Raise a `DomainError` if the product of the largest magnitudes of tensors, each at least 1, exceeds a limit.

    A factor below 1 does not permit larger other factors, because gradients with respect to it contain them. Costs one
    pass over each tensor, for a parameter one after each change. Skipped if values can't be read; deferred on an
    accelerator.

    Args:
        limit: largest accepted product; ``None`` accepts everything.
        kind: the values and who limits them, e.g. ``"votes of EM"``, for the message.
        name: the arguments, for the message.
        factors: the tensors.
        scale: another factor.
    """
    if limit is None or not is_readable(*factors) or any(factor.numel() == 0 for factor in factors):
        return
    dtype = str(factors[0].dtype).removeprefix("torch.")

    def describe(largest: float) -> Exception | None:
        """Return the `DomainError` if the product of the largest magnitudes, times ``scale``, exceeds the limit."""
        product = largest * scale
        if not product > limit:
            return None
        return DomainError(
            f"{name} must be smaller: {kind} may reach {product:.1e}, and above {limit:.1e} squares or gradients could "
            f"overflow in {dtype}; normalise the values or use a wider dtype"
        )

    if is_host(factors[0].device):  # without tensors of one element: a small layer takes a tenth of a millisecond
        error = describe(math.prod(_largest_magnitude(factor) for factor in factors))
        if error is not None:
            raise error
    else:
        check_value(lambda: _product_of_largest(factors), describe, factors[0].device)


# Largest magnitudes of parameters, with their version and address. At batch 1, a pass over the weights of a layer takes
# up to a third of the time of the layer. Changes through ``parameter.data`` do not change the version.
_PARAMETER_MAGNITUDES: MutableMapping[Tensor, tuple[int, int, float]] = WeakTensorKeyDictionary()


def _largest_magnitude(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor in host memory, or 1 if that is larger; cached for parameters."""
    if not isinstance(tensor, torch.nn.Parameter) or tensor.is_inference():  # inference tensors have no version
        return _compute_magnitude(tensor)
    version, address = tensor._version, tensor.data_ptr()
    cached = _PARAMETER_MAGNITUDES.get(tensor)
    if cached is None or cached[:2] != (version, address):
        cached = _PARAMETER_MAGNITUDES[tensor] = version, address, _compute_magnitude(tensor)
    return cached[2]


def _compute_magnitude(tensor: Tensor) -> float:
    least, largest = torch.aminmax(tensor.detach())
    return max(1.0, -least.item(), largest.item())


def _product_of_largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the product of the largest magnitudes of tensors, each at least 1, without reading a value."""
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # MPS has no float64
    product = torch.ones((), dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        least, largest = torch.aminmax(tensor.detach())
        product = product * torch.maximum(-least, largest).to(dtype).clamp_min(1)
    return product


def check_no_nan(values: Tensor, name: str) -> None:
    """Raise if scores are not floating-point or contain NaN, which compares as false and would be counted as a score.

    Skipped if values can't be read; on an accelerator read at once, unless inside `deferred_checks`.
    """
    check_float(values, name)
    if not is_readable(values):
        return
    n_values = values.numel()

    def describe(n_nan: float) -> Exception | None:
        text = f"{name} must not contain NaN, got {int(n_nan)} NaN of {n_values} values"
        return ValueError(text) if n_nan else None

    check_value(lambda: torch.isnan(values.detach()).sum(), describe, values.device, required=True)


def check_non_negative(activation: Tensor | None, name: str) -> None:
    """Raise a ValueError if an activation is negative: activations are probabilities.

    Skipped if values can't be read; deferred on an accelerator.
    """
    if activation is None or not is_readable(activation) or activation.numel() == 0:
        return

    def describe(least: float) -> Exception | None:
        return ValueError(f"{name} must not be negative, got {least:g}") if least < 0 else None

    check_value(lambda: activation.detach().min(), describe, activation.device)
