"""Memory that is known: what Adam keeps of every parameter; and a process that is killed while it measures."""

import os
from typing import Any

import pytest

from torchcaps.papers.measures.peak import training_peaks
from torchcaps.training.errors import RunError


class Deadly:
    """What ends the process that it is sent to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_process_takes_what_weights_gradients_and_the_optimiser_do() -> None:
    """35,445,522 parameters have four numbers of four bytes each with Adam; half the width has far fewer of them."""
    ticks: list[int] = []
    cases = {"whole": ("sabour2017_cnn_mnist", {}), "half": ("sabour2017_cnn_mnist", {"width": 128})}
    found = training_peaks(cases, 1, lambda: ticks.append(1))
    assert len(ticks) == 2
    kept = 16 * 35_445_522
    assert kept < found["whole"] < 1.6 * kept, "and what a step of Adam needs while it is taken"
    assert found["half"] < 0.7 * found["whole"], "each in a process of its own: nothing is left of the first"


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(RunError, match="capsnet_small was killed: it may have wanted more than there is"):
        training_peaks({"one": ("capsnet_small", {"width": Deadly()})}, 1, lambda: None)
