"""heinsen2019_smallnorb: coordinates, shared matrices, logits."""

import torch

import torchcaps
from torchcaps.models.heinsen2019 import CoordinateChannels
from torchcaps.nn import DenseCapsules


def test_coordinates_are_rows_and_columns_from_minus_one_to_one() -> None:
    images = torch.rand(2, 1, 3, 5)
    found = CoordinateChannels()(images)
    assert torch.equal(found[:, :1], images)
    assert found[1, 1, :, 4].tolist() == [-1, 0, 1]
    assert found[0, 2, 1].tolist() == [-1, -0.5, 0, 0.5, 1]


def test_parameters_do_not_depend_on_the_image_size() -> None:
    """Matrices, biases and costs of the first capsule layer are shared by all children."""
    fields = {"width": 4, "types": 2, "parts": 3, "dim": 4}
    small, large = (
        torchcaps.create_model("heinsen2019_smallnorb", image=(2, side, side), **fields) for side in (64, 96)
    )
    assert small.n_parameters == large.n_parameters
    layer = small.get_submodule("capsules.layers.parts")
    assert isinstance(layer, DenseCapsules)
    assert layer.geometry.shared
    assert layer.weight.shape[0] == 1


def test_scores_are_logits_that_start_at_zero() -> None:
    """Both costs are 0 at first, so that all scores are: the authors' initialisation. A step changes them."""
    torch.manual_seed(0)
    fields = {"image": (1, 40, 40), "classes": 3, "width": 4, "types": 2, "parts": 3, "dim": 4, "strides": (2, 2)}
    model = torchcaps.create_model("heinsen2019_smallnorb", **fields)
    images, labels = torch.rand(6, 1, 40, 40), torch.tensor([0, 1, 2, 2, 2, 2])
    output = model(images)
    assert output.scores.tolist() == [[0.0] * 3] * 6
    model.loss()(output, labels).backward()
    optimizer = model.recipe.optimizer.make(model.parameters())
    assert isinstance(optimizer, torch.optim.RAdam)
    optimizer.step()
    assert model(images).scores.argmax(1).tolist() == [2] * 6
