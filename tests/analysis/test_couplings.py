"""Couplings by iteration: their entropy and their maps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps.analysis.common import traced_outputs
from torchcaps.analysis.couplings import (
    CouplingMaps,
    LayerCouplings,
    coupling_maps,
    draw_couplings,
    normalized_entropy,
)
from torchcaps.capsules import Capsules
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.votes import Wiring


def maps_of(name: str, n_images: int = 3, **options: Any) -> tuple[Any, CouplingMaps]:
    model: Any = narrow(name)
    return model, coupling_maps(model, batch(model, n_images)[0], **options)


def test_the_first_iteration_of_dynamic_routing_is_uniform() -> None:
    model: Any = narrow("sabour2017_mnist").double()
    (layer,) = coupling_maps(model, batch(model, 3)[0].double()).layers
    assert layer.entropy is not None
    assert layer.maps is not None
    assert layer.entropy.shape == (3, 3)
    assert largest_difference(layer.entropy[:, 0], torch.ones(3)) < EXACT
    assert float(layer.entropy[:, 1:].max()) < 1
    assert layer.uniform == 4 / 10
    assert largest_difference(layer.maps[:, 0], torch.full((3, 6, 6), 0.4, dtype=torch.float64)) < EXACT


def test_one_hot_couplings_of_a_model_have_entropy_0() -> None:
    """Votes so large that each softmax is one-hot."""
    model: Any = narrow("sabour2017_mnist").double()
    with torch.no_grad():
        model.capsules.layers["digit"].weight.mul_(1e9)
    result = coupling_maps(model, batch(model, 3)[0].double())
    (layer,) = result.layers
    assert layer.entropy is not None
    assert layer.maps is not None
    assert largest_difference(layer.entropy[:, 2], torch.zeros(3)) < EXACT
    to_class = layer.couplings[0, 2, :, result.classes[0]]
    assert to_class.unique().tolist() == [0.0, 1.0]
    assert layer.maps[0, 2].tolist() == to_class.view(6, 6, 4).sum(-1).tolist()


def test_one_hot_couplings_have_entropy_0_and_uniform_ones_1() -> None:
    dense = Wiring(6)
    hot = torch.zeros(2, 6, 4, dtype=torch.float64)
    hot[..., 1] = 1
    assert normalized_entropy(hot, Dynamic(), dense).tolist() == [[0.0] * 6] * 2
    assert (
        largest_difference(normalized_entropy(torch.full_like(hot, 0.25), Dynamic(), dense), torch.ones(2, 6)) < EXACT
    )
    half = torch.zeros_like(hot)
    half[..., :2] = 0.5
    assert largest_difference(normalized_entropy(half, Dynamic(), dense), torch.full((2, 6), 0.5)) < EXACT


def test_entropy_over_the_children_of_a_parent_for_attention() -> None:
    coupling = torch.zeros(1, 4, 3, dtype=torch.float64)
    coupling[:, 0, 0] = 1
    coupling[:, :2, 1] = 0.5
    coupling[:, :, 2] = 0.25
    assert largest_difference(normalized_entropy(coupling, Attention(), Wiring(4)), torch.tensor([[0, 0.5, 1]])) < EXACT


def test_global_competition_is_over_all_parents_of_a_child() -> None:
    """Three positions under windows of two: two windows read the middle one, which has twice as many parents."""
    wiring = Wiring(1, grid=(1, 3), kernel=(1, 2), competition="global")
    routing = EM(competition="global")
    uniform = torch.tensor([[1 / 2, 1 / 4], [1 / 4, 1 / 2]], dtype=torch.float64)  # [site, slot]
    uniform = uniform[None, None, :, :, None].expand(1, 1, 2, 2, 2)  # two parent types
    assert largest_difference(normalized_entropy(uniform, routing, wiring), torch.ones(1, 3)) < EXACT
    hot = torch.zeros(1, 1, 2, 2, 2, dtype=torch.float64)
    hot[0, 0, 0, 0, 0] = hot[0, 0, 0, 1, 1] = hot[0, 0, 1, 1, 0] = 1  # each child couples to one parent
    assert normalized_entropy(hot, routing, wiring).tolist() == [[0.0, 0.0, 0.0]]
    assert (
        float(normalized_entropy(hot, EM(), Wiring(1, grid=(1, 3), kernel=(1, 2))).max()) == 1
    )  # locally a slot of zeros counts as uniform


def test_slots_that_read_padding_are_excluded() -> None:
    wiring = Wiring(1, grid=(1, 1), kernel=(1, 3), padding=(0, 0, 1, 1))
    coupling = torch.full((1, 1, 1, 3, 2), 0.5, dtype=torch.float64)
    coupling[0, 0, 0, 1] = torch.tensor([1.0, 0.0])
    assert normalized_entropy(coupling, Dynamic(), wiring).tolist() == [[0.0]]


def test_maps_are_at_the_positions_of_the_children() -> None:
    """Children of length zero never agree with a parent, so that only their couplings stay uniform."""
    model: Any = narrow("sabour2017_mnist").double()

    def zero_position(module: Any, inputs: Any, output: Capsules) -> Capsules:
        pose = output.pose.clone()
        pose[:, 1, 4] = 0
        return Capsules(pose)

    model.front.register_forward_hook(zero_position)
    (layer,) = coupling_maps(model, batch(model, 2)[0].double()).layers
    assert layer.maps is not None
    difference = (layer.maps[:, 2] - layer.uniform).abs()
    assert float(difference[:, 1, 4].max()) < EXACT
    difference[:, 1, 4] = 1
    assert float(difference.min()) > EXACT


@pytest.mark.parametrize("name", ["hinton2018_smallnorb", "chen2019_conv_mnist", "tsai2020_cifar10", "yang2021_mnist"])
def test_a_map_sums_to_all_couplings_to_the_class(name: str) -> None:
    _, result = maps_of(name, n_kept=2, batch_size=2)
    layer = result.layers[-1]
    assert layer.maps is not None
    assert len(layer.maps) == 3
    for n in range(2):
        total = layer.couplings[n, ..., result.classes[n]].flatten(1).sum(1)
        assert relative_rms(layer.maps[n].flatten(1).sum(1), total) < SAME[torch.float32]


@pytest.mark.parametrize(
    "name", ["sabour2017_mnist", "yang2021_cifar10", "chen2019_fc_cifar10", "tsai2020_resnet_cifar10"]
)
def test_centers_are_those_of_the_receptive_fields(name: str) -> None:
    """The centre between the outermost pixels with a gradient from a capsule in the middle of the grid."""
    model, result = maps_of(name, 1)
    layer = result.layers[-1]
    assert layer.maps is not None
    row, column = layer.maps.shape[2] // 2, (layer.maps.shape[3] - 1) // 2
    model.eval()
    image = torch.rand(1, *model.spec.image, requires_grad=True)
    capsules = model.front(image)
    for below in list(model.capsules.layers.values())[:-1]:
        capsules = below(capsules)
    (gradient,) = torch.autograd.grad(capsules.pose[0, row, column].pow(2).sum(), image)
    field = gradient[0].abs().sum(0) > 0
    top, row_step, left, column_step = layer.centers
    for start, step, index, pixels in ((top, row_step, row, field.any(1)), (left, column_step, column, field.any(0))):
        inside = pixels.nonzero()[:, 0]
        assert start + step * index == (float(inside[0]) + float(inside[-1])) / 2


def test_labels_select_the_class_of_a_map() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, _ = batch(model, 3)
    result = coupling_maps(model, images, labels)
    assert result.classes.tolist() == labels[:, 0].tolist()


def test_layers_without_entropy_or_maps_have_a_reason() -> None:
    free = maps_of("chen2019_multi_cifar10", 1)[1].layers
    assert [(layer.entropy, "Trainable" in layer.why_no_entropy) for layer in free] == [(None, True)] * len(free)
    assert free[0].maps is None
    assert free[0].why_no_maps != ""
    assert free[0].couplings.shape[:2] == (1, 1)
    channels = maps_of("choi2019_mnist", 1)[1].layers[-1]
    assert channels.maps is None
    assert "Attention" in channels.why_no_maps
    assert channels.entropy is not None
    assert channels.couples == "children"
    high = maps_of("tsai2020_cifar100", 1)[1].layers[-1]
    assert high.maps is None
    assert "grid" in high.why_no_maps


def test_traced_outputs_have_the_capsules_of_every_layer() -> None:
    model: Any = narrow("tsai2020_cifar10").eval()
    images = batch(model, 3)[0]
    batches = list(traced_outputs(model, images, 2))
    assert [start for start, _, _ in batches] == [0, 2]
    _, output, capsules = batches[0]
    assert output.capsules is not None
    assert len(capsules) == 4
    assert relative_rms(capsules[0].pose, model.front(images[:2]).pose) < SAME[torch.float32]
    assert relative_rms(capsules[-1].flatten().pose, output.capsules.pose) < SAME[torch.float32]
    assert dict(model.front._forward_hooks) == {}


def test_invalid_arguments_are_rejected() -> None:
    model: Any = narrow("sabour2017_mnist")
    images = batch(model, 2)[0]
    with pytest.raises(ValueError, match="n_kept"):
        coupling_maps(model, images, n_kept=3)
    with pytest.raises(ValueError, match="images"):
        coupling_maps(model, images[:0])
    plain: Any = narrow("sabour2017_cnn_mnist")
    with pytest.raises(ValueError, match="sabour2017_cnn_mnist"):
        coupling_maps(plain, images)


@pytest.mark.parametrize("name", ["sabour2017_mnist", "chen2019_fc_mnist", "tsai2020_cifar100"])
def test_figure(name: str, tmp_path: Path) -> None:
    _, result = maps_of(name, 2)
    assert isinstance(result.layers[0], LayerCouplings)
    draw_couplings(result, tmp_path / "maps.png", name, n=1)
    assert (tmp_path / "maps.png").stat().st_size > 0


def test_figure_wraps_long_class_names(tmp_path: Path) -> None:
    """A long name would cover the titles of the neighbouring maps."""
    _, result = maps_of("sabour2017_mnist", 2)
    classes = [f"photograph of a very small object {n}" for n in range(10)]
    draw_couplings(result, tmp_path / "maps.svg", n=1, classes=classes)
    text = (tmp_path / "maps.svg").read_text()
    assert "<!-- photograph of a -->" in text
    assert not any(name in text for name in classes)
