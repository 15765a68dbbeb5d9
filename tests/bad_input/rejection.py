"""The form of every error for invalid input, and layers and tensors to provoke it with."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from torchcaps._core.validation import FieldError, FieldTypeError
from torchcaps.nn import ConvCapsules, Decoder, DenseCapsules
from torchcaps.routing import Dynamic

MAX_MESSAGE_LENGTH = 320  # a long sentence, with two shapes in it


class Rejection(NamedTuple):
    """A call with invalid input and the parts of the error message that do not depend on its wording.

    Args:
        call: the call.
        error: type of the exception.
        argument: the name of the argument (or field) at fault.
        value: the offending value, shape, dtype or type, as the message prints it; empty if there is none.
        accepted: an accepted value, shape or type that the message must list; empty if there is nothing to list.
    """

    call: Callable[[], Any]
    error: type[Exception]
    argument: str
    value: str = ""
    accepted: str = ""


def check_rejection(rejection: Rejection) -> None:
    """Check that a call raises an error of one sentence that names the argument, its value and what is accepted."""
    with pytest.raises(rejection.error) as raised:
        rejection.call()
    # an unrelated subclass, such as a UnicodeError, would pass for a ValueError
    exact = {rejection.error, {ValueError: FieldError, TypeError: FieldTypeError}.get(rejection.error)}
    assert type(raised.value) in exact, f"{type(raised.value).__name__} is raised, a subclass"
    check_sentence(str(raised.value), rejection.argument, rejection.value, rejection.accepted)


def check_sentence(message: str, *mentions: str) -> None:
    """Check that a message is one sentence and contains all ``mentions`` as whole words."""
    assert "\n" not in message, f"more than one line: {message!r}"
    assert 0 < len(message) <= MAX_MESSAGE_LENGTH, f"{len(message)} characters: {message!r}"
    assert " " in message, f"not a sentence: {message!r}"
    missing = [text for text in mentions if text and not is_mentioned(text, message)]
    assert not missing, f"{missing} not in the message: {message!r}"


def is_mentioned(text: str, message: str) -> bool:
    """Return whether a text occurs in a message and is not a part of a longer word or number."""
    before, after = (r"(?<!\w)" if text[0].isalnum() else ""), (r"(?!\w|\.\d)" if text[-1].isalnum() else "")
    return re.search(before + re.escape(text) + after, message) is not None


def dense(**changes: Any) -> DenseCapsules:
    sizes = {"children": 6, "child_dim": 4, "parents": 3, "parent_dim": 4}
    return DenseCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def conv(**changes: Any) -> ConvCapsules:
    sizes = {"child_types": 2, "child_dim": 4, "parent_types": 3, "parent_dim": 4, "kernel_size": 3}
    return ConvCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def with_nan(*shape: int) -> torch.Tensor:
    """Zeros, except that the first image is NaN."""
    return torch.zeros(shape).index_fill(0, torch.tensor([0]), float("nan"))


def labels(*indices: int) -> torch.Tensor:
    return torch.tensor(indices)


pose, grid, images = torch.randn(2, 6, 4), torch.randn(2, 5, 5, 2, 4), torch.rand(2, 1, 6, 6)
scores = torch.rand(2, 3)
decoder = Decoder(3, 4, (1, 6, 6), hidden=(5,))
