"""The error of analyses that need a decoder names a remedy only if there is one."""

import pytest

from torchcaps import create_model
from torchcaps.analysis.common import require_decoder


def test_a_model_without_reconstruction_can_be_trained_with_it() -> None:
    model = create_model("capsnet_small", reconstruction=False)
    with pytest.raises(ValueError, match=r"perturbation.*--reconstruction true"):
        require_decoder(model, "perturbation")


def test_a_model_with_any_number_of_objects_has_no_decoder() -> None:
    model = create_model("tsai2020_diverse_vector", width=16, types=4, dim=16)
    with pytest.raises(ValueError, match="perturbation") as raised:
        require_decoder(model, "perturbation")
    assert "--reconstruction" not in str(raised.value)
