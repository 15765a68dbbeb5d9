"""Invalid arguments of the ascent of `Quadratic`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.bad_input.rejection import Rejection, check_rejection
from tests.traps.test_quadratic import LABELS, make_batch, make_class_layer
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import Quadratic


def modules(*layers: DenseCapsules, forward: Callable[[nn.ModuleList, torch.Tensor], Any]) -> nn.ModuleList:
    """Return a module with layers and a forward function of the module and its input."""
    module = nn.ModuleList(layers)
    module.forward = lambda pose: forward(module, pose)
    return module


UNUSED_LAYER = modules(
    make_class_layer(Quadratic()), make_class_layer(Quadratic()), forward=lambda module, pose: module[0](pose)
)
INDEPENDENT_LAYERS = modules(
    make_class_layer(Quadratic()),
    make_class_layer(Quadratic()),
    forward=lambda module, pose: (module[0](pose), module[1](pose)),
)
REPEATED_LAYER = modules(
    make_class_layer(Quadratic(), parents=5), forward=lambda module, pose: module[0](module[0](pose))
)
CLASS_LAYER = make_class_layer(Quadratic())
GRID_LAYER = ConvCapsules(2, 4, 3, 4, 2, routing=Quadratic())

REJECTIONS = {
    "no Quadratic layer": Rejection(
        lambda: Quadratic.ascend(nn.Linear(2, 2), make_batch(), LABELS), ValueError, "module", "Linear", "Quadratic"
    ),
    "not a module": Rejection(
        lambda: Quadratic.ascend(None, make_batch(), LABELS),  # type: ignore[arg-type]
        TypeError,
        "module",
        "NoneType",
    ),
    "label too large": Rejection(
        lambda: Quadratic.ascend(CLASS_LAYER, make_batch(), LABELS + 1), ValueError, "labels", "3", "0..2"
    ),
    "number of labels": Rejection(
        lambda: Quadratic.ascend(CLASS_LAYER, make_batch(), LABELS[:5]), ValueError, "labels", "5", "6"
    ),
    "unused layer": Rejection(
        lambda: Quadratic.ascend(UNUSED_LAYER, make_batch(), LABELS), ValueError, "module", "1", "2"
    ),
    "independent layers": Rejection(
        lambda: Quadratic.ascend(INDEPENDENT_LAYERS, make_batch(), LABELS), ValueError, "module", "last"
    ),
    "repeated layer": Rejection(
        lambda: Quadratic.ascend(REPEATED_LAYER, make_batch(), LABELS), ValueError, "module", "twice", "once"
    ),
    "class layer on a grid": Rejection(
        lambda: Quadratic.ascend(GRID_LAYER, torch.randn(6, 3, 3, 2, 4), LABELS), ValueError, "class layer", "[2, 2]"
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_invalid_ascent_is_rejected(name: str) -> None:
    check_rejection(REJECTIONS[name])


def test_ascent_in_inference_mode_is_rejected() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        Quadratic.ascend(CLASS_LAYER, make_batch(), LABELS)
