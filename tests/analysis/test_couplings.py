"""Couplings by iteration: how evenly they are spread, and where."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps.analysis.couplings import CouplingMaps, LayerCouplings, coupling_maps, draw_couplings, routed, spread
from torchcaps.capsules import Capsules
from torchcaps.routing import EM, Attention, Dynamic
from torchcaps.votes import Wiring


def traced(name: str, n_images: int = 3, **options: Any) -> tuple[Any, CouplingMaps]:
    model: Any = narrow(name)
    return model, coupling_maps(model, batch(model, n_images)[0], **options)


def test_the_first_iteration_of_dynamic_routing_is_even() -> None:
    model: Any = narrow("sabour2017_mnist").double()
    (layer,) = coupling_maps(model, batch(model, 3)[0].double()).layers
    assert layer.entropy is not None
    assert layer.maps is not None
    assert layer.entropy.shape == (3, 3)
    assert largest_difference(layer.entropy[:, 0], torch.ones(3)) < EXACT
    assert bool((layer.entropy[:, 1:] < 1).all())
    assert layer.even == 4 / 10
    assert largest_difference(layer.maps[:, 0], torch.full((3, 6, 6), 0.4, dtype=torch.float64)) < EXACT


def test_children_that_chose_a_parent_have_no_entropy() -> None:
    """Votes so large that each softmax is 1 in one place and 0 elsewhere."""
    model: Any = narrow("sabour2017_mnist").double()
    with torch.no_grad():
        model.capsules.layers["digit"].weight.mul_(1e9)
    found = coupling_maps(model, batch(model, 3)[0].double())
    (layer,) = found.layers
    assert layer.entropy is not None
    assert layer.maps is not None
    assert largest_difference(layer.entropy[:, 2], torch.zeros(3)) < EXACT
    given = layer.couplings[0, 2, :, found.classes[0]]
    assert given.unique().tolist() == [0.0, 1.0]
    assert torch.equal(layer.maps[0, 2], given.view(6, 6, 4).sum(-1))


def test_one_hot_couplings_have_entropy_0_and_even_ones_1() -> None:
    dense = Wiring(6)
    hot = torch.zeros(2, 6, 4, dtype=torch.float64)
    hot[..., 1] = 1
    assert spread(hot, Dynamic(), dense).tolist() == [[0.0] * 6] * 2
    assert largest_difference(spread(torch.full_like(hot, 0.25), Dynamic(), dense), torch.ones(2, 6)) < EXACT
    half = torch.zeros_like(hot)
    half[..., :2] = 0.5
    assert largest_difference(spread(half, Dynamic(), dense), torch.full((2, 6), 0.5)) < EXACT


def test_children_compete_where_parents_attend() -> None:
    coupling = torch.zeros(1, 4, 3, dtype=torch.float64)
    coupling[:, 0, 0] = 1
    coupling[:, :2, 1] = 0.5
    coupling[:, :, 2] = 0.25
    assert largest_difference(spread(coupling, Attention(), Wiring(4)), torch.tensor([[0, 0.5, 1]])) < EXACT


def test_global_competition_counts_all_parents_of_a_child() -> None:
    """A row of three places under windows of two: the middle one has two readers and so twice the parents."""
    wiring = Wiring(1, grid=(1, 3), kernel=(1, 2), competition="global")
    routing = EM(competition="global")
    even = torch.tensor([[1 / 2, 1 / 4], [1 / 4, 1 / 2]], dtype=torch.float64)  # [site, slot]
    even = even[None, None, :, :, None].expand(1, 1, 2, 2, 2)  # two parent types
    assert largest_difference(spread(even, routing, wiring), torch.ones(1, 3)) < EXACT
    one = torch.zeros(1, 1, 2, 2, 2, dtype=torch.float64)
    one[0, 0, 0, 0, 0] = one[0, 0, 0, 1, 1] = one[0, 0, 1, 1, 0] = 1  # each child gives all to one parent
    assert spread(one, routing, wiring).tolist() == [[0.0, 0.0, 0.0]]
    assert float(spread(one, EM(), Wiring(1, grid=(1, 3), kernel=(1, 2))).max()) == 1  # locally an empty slot is even


def test_slots_that_read_padding_are_left_out() -> None:
    wiring = Wiring(1, grid=(1, 1), kernel=(1, 3), padding=(0, 0, 1, 1))
    coupling = torch.full((1, 1, 1, 3, 2), 0.5, dtype=torch.float64)
    coupling[0, 0, 0, 1] = torch.tensor([1.0, 0.0])
    assert spread(coupling, Dynamic(), wiring).tolist() == [[0.0]]


def test_a_map_lies_over_the_children_that_it_is_of() -> None:
    """Children of length zero never agree with anybody, so that their couplings alone stay even."""
    model: Any = narrow("sabour2017_mnist").double()

    def silence(module: Any, given: Any, made: Capsules) -> Capsules:
        pose = made.pose.clone()
        pose[:, 1, 4] = 0
        return Capsules(pose)

    model.front.register_forward_hook(silence)
    (layer,) = coupling_maps(model, batch(model, 2)[0].double()).layers
    assert layer.maps is not None
    away = (layer.maps[:, 2] - layer.even).abs()
    assert float(away[:, 1, 4].max()) < EXACT
    away[:, 1, 4] = 1
    assert float(away.min()) > EXACT


@pytest.mark.parametrize("name", ["hinton2018_smallnorb", "chen2019_conv_mnist", "tsai2020_cifar10", "yang2021_mnist"])
def test_a_map_holds_all_couplings_to_the_class(name: str) -> None:
    _, found = traced(name, keep=2, batch_size=2)
    layer = found.layers[-1]
    assert layer.maps is not None
    assert len(layer.maps) == 3
    for n in range(2):
        total = layer.couplings[n, ..., found.classes[n]].flatten(1).sum(1)
        assert relative_rms(layer.maps[n].flatten(1).sum(1), total) < SAME[torch.float32]


@pytest.mark.parametrize(
    "name", ["sabour2017_mnist", "yang2021_cifar10", "chen2019_fc_cifar10", "tsai2020_resnet_cifar10"]
)
def test_a_place_is_drawn_in_the_middle_of_what_it_sees(name: str) -> None:
    """Of the pixels that move a capsule in the middle of the grid, the outermost ones."""
    model, found = traced(name, 1)
    layer = found.layers[-1]
    assert layer.maps is not None
    row, column = layer.maps.shape[2] // 2, (layer.maps.shape[3] - 1) // 2
    model.eval()
    image = torch.rand(1, *model.spec.image, requires_grad=True)
    capsules = model.front(image)
    for below in list(model.capsules.layers.values())[:-1]:
        capsules = below(capsules)
    (slope,) = torch.autograd.grad(capsules.pose[0, row, column].pow(2).sum(), image)
    seen = slope[0].abs().sum(0) > 0
    top, down, left, across = layer.places
    for start, step, place, pixels in ((top, down, row, seen.any(1)), (left, across, column, seen.any(0))):
        reached = pixels.nonzero()[:, 0]
        assert start + step * place == (float(reached[0]) + float(reached[-1])) / 2


def test_labels_choose_the_class_of_a_map() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, _ = batch(model, 3)
    found = coupling_maps(model, images, labels)
    assert found.classes.tolist() == labels[:, 0].tolist()


def test_what_is_missing_says_why() -> None:
    free = traced("chen2019_multi_cifar10", 1)[1].layers
    assert all(layer.entropy is None and "free" in layer.why_no_entropy for layer in free)
    assert free[0].maps is None
    assert free[0].why_no_maps == "its parents are no classes"
    assert free[0].couplings.shape[:2] == (1, 1)
    channels = traced("choi2019_mnist", 1)[1].layers[-1]
    assert channels.maps is None
    assert "whole child channels" in channels.why_no_maps
    assert channels.entropy is not None
    assert channels.couples == "children"
    high = traced("tsai2020_cifar100", 1)[1].layers[-1]
    assert high.maps is None
    assert high.why_no_maps == "its children stand on no grid"


def test_children_come_with_their_layers() -> None:
    model: Any = narrow("tsai2020_cifar10").eval()
    images = batch(model, 3)[0]
    runs = list(routed(model, images, 2))
    assert [start for start, _, _ in runs] == [0, 2]
    _, output, children = runs[0]
    assert output.capsules is not None
    assert len(children) == 4
    assert relative_rms(children[0].pose, model.front(images[:2]).pose) < SAME[torch.float32]
    assert relative_rms(children[-1].flatten().pose, output.capsules.pose) < SAME[torch.float32]
    assert not model.front._forward_hooks


def test_what_makes_no_sense_is_refused() -> None:
    model: Any = narrow("sabour2017_mnist")
    images = batch(model, 2)[0]
    with pytest.raises(ValueError, match="keep must be"):
        coupling_maps(model, images, keep=3)
    with pytest.raises(ValueError, match="images must be one or more"):
        coupling_maps(model, images[:0])
    plain: Any = narrow("sabour2017_cnn_mnist")
    with pytest.raises(ValueError, match="coupling maps needs class capsules"):
        coupling_maps(plain, images)


@pytest.mark.parametrize("name", ["sabour2017_mnist", "chen2019_fc_mnist", "tsai2020_cifar100"])
def test_it_is_drawn(name: str, tmp_path: Path) -> None:
    _, found = traced(name, 2)
    assert isinstance(found.layers[0], LayerCouplings)
    draw_couplings(found, tmp_path / "maps.png", name, n=1)
    assert (tmp_path / "maps.png").stat().st_size > 0
