"""Symmetries: batch independence, permutation of children and parents, translation, normalised couplings."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.contract.cases import ALL_CASES, CASES, PARENTS, Case, over
from tests.tolerances import SAME, relative_rms
from torchcaps import route
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer

CLOSE = SAME[torch.float64]


@over([case for case in ALL_CASES if case.unsupported])
def test_unsupported_combination_is_rejected(case: Case) -> None:
    field = "coordinates=True" if coordinates(case) else "residual=True"
    with pytest.raises(ValueError, match=field):
        case.layer()(case.children())


@over([case for case in CASES if case.geometry == "conv_whole"], n=40)
def test_convolution_over_the_whole_grid_equals_dense_layer(case: Case) -> None:
    """The dense layer receives the children that the slots of the window read, in the order of the wiring."""
    layer, children = case.layer(), case.children()
    g = layer.geometry
    read = layer._wiring(children).gather(children.pose)
    if g.children_per_slot > 1:  # [B, 1, 1, I, reads, K] -> a matrix [A, reads * X], flat
        read = read.unflatten(-1, (g.rows, -1)).movedim(-3, -2).flatten(-3)
    read = read.flatten(1, 3)
    activation = children.activation.flatten(1) if g.children_per_slot == 1 else None
    routing = dataclasses.replace(case.routing, coordinates=False) if coordinates(case) else case.routing
    dense = DenseCapsules(g.slots, g.rows * g.columns, g.parents, g.dim, routing=routing, pose=g.rows).double().eval()
    dense.weight.data.copy_(layer.weight)
    if layer.bias is not None:
        dense.bias.data.copy_(layer.bias)
    for name, tensor in layer.coefficients.named().items():
        dense.coefficients.named()[name].data.copy_(tensor.reshape(dense.coefficients.named()[name].shape))
    votes = dense.votes(Capsules(read)).dense()
    if coordinates(case):  # a dense layer has no positions: add them to its votes
        votes = votes + layer.routing.vote_offset(g, layer._wiring(children), votes)[0, 0]
    expected = route(votes, routing, activation, children=read, coefficients=dense.coefficients.named())
    if not coordinates(case):
        torch.testing.assert_close(dense(Capsules(read, activation)).pose, expected.pose, rtol=0, atol=0)
    parents = layer(children)
    assert parents.pose.shape[1:3] == (1, 1)
    assert relative_rms(parents.pose[:, 0, 0], expected.pose) < CLOSE
    if expected.activation is not None:
        assert relative_rms(parents.activation[:, 0, 0], expected.activation) < CLOSE


def coordinates(case: Case) -> bool:
    return getattr(case.routing, "coordinates", False)


@over(CASES, n=80)
def test_image_is_independent_of_its_batch(case: Case) -> None:
    layer, children = case.layer(), case.children(batch=3)
    batch = layer(children)
    for image in range(3):
        single = layer(Capsules(*(tensor[image : image + 1] for tensor in children)))
        assert single.pose.shape == (1, *batch.pose.shape[1:])
        assert relative_rms(single.pose[0], batch.pose[image]) < CLOSE
        if single.activation is not None:
            assert relative_rms(single.activation[0], batch.activation[image]) < CLOSE


def permute(layer: CapsuleLayer, case: Case, axis: str, order: Tensor) -> CapsuleLayer:
    """Return the layer with its slots ("I") or parents ("J") in another order."""
    result = case.layer()
    weight_axis = {"I": -4, "J": -2}[axis]
    with torch.no_grad():
        result.weight.copy_(layer.weight.index_select(weight_axis, order))
        if layer.bias is not None:
            result.bias.copy_(layer.bias.index_select({"I": 0, "J": 1}[axis], order))  # type: ignore[union-attr]
        for name, coefficient in layer.routing.coefficients(layer.geometry).items():
            tensor = layer.coefficients.named()[name]
            sites = tensor.dim() - len([a for a in coefficient.axes if a != "L"])
            axes = [None] * sites + [a for a in coefficient.axes if a != "L"]
            for dim, letter in enumerate(axes):
                if letter == axis:
                    tensor = tensor.index_select(dim, order)
            result.coefficients.named()[name].copy_(tensor)
    return result


@over([case for case in CASES if not case.routing.residual], n=80)
def test_parents_are_invariant_to_the_order_of_children(case: Case) -> None:
    layer, children = case.layer(), case.children()
    types = torch.arange(case.types).roll(1)
    shuffled = Capsules(children.pose.index_select(-2, types), children.activation.index_select(-1, types))
    cells = layer.geometry.slots // case.types
    slots = (torch.arange(cells)[:, None] * case.types + types).flatten()
    parents = permute(layer, case, "I", slots)(shuffled)
    assert relative_rms(parents.pose, layer(children).pose) < CLOSE


@over(CASES, n=80)
def test_permuted_weights_permute_parents(case: Case) -> None:
    layer, children = case.layer(), case.children()
    order = torch.tensor([2, 0, 1])
    expected = layer(children)
    permuted = permute(layer, case, "J", order)
    if case.routing.residual:  # child n is added to parent n, so the children are permuted too
        permuted = permute(permuted, case, "I", order)
        children = Capsules(children.pose.index_select(-2, order), children.activation.index_select(-1, order))
    parents = permuted(children)
    assert len(order) == PARENTS
    assert relative_rms(parents.pose, expected.pose.index_select(-2, order)) < CLOSE
    if expected.activation is not None:
        assert relative_rms(parents.activation, expected.activation.index_select(-1, order)) < CLOSE


def is_translation_equivariant(case: Case) -> bool:
    """Return whether a layer treats all positions alike: no coefficients per position, no coordinates, no border."""
    layer = case.layer()
    by_position = any("L" in c.axes for c in layer.routing.coefficients(layer.geometry).values())
    offset = layer.routing.vote_offset(layer.geometry, layer._wiring(case.children()), layer.weight)
    return not by_position and offset is None and case.routing.competition == "local" and not case.routing.residual


@over(
    [case for case in CASES if case.geometry == "conv_s1" and is_translation_equivariant(case)],
    n=40,
    stride={"1": 1, "2": 2},
)
def test_shifting_children_by_the_stride_shifts_parents_by_one(case: Case, stride: int) -> None:
    common = {"routing": case.routing, "pose": case.pose}
    layer = ConvCapsules(2, 4, 3, 4, 3, stride, **common).double().eval()  # type: ignore[arg-type]
    pose = torch.randn(2, 9, 9, 2, 4, dtype=torch.float64)
    activation = torch.rand(2, 9, 9, 2, dtype=torch.float64)
    before = layer(Capsules(pose, activation)).pose
    moved = Capsules(pose.roll(stride, 1), activation.roll(stride, 1))
    assert relative_rms(layer(moved).pose[:, 1:], before[:, :-1]) < CLOSE
    moved = Capsules(pose.roll(stride, 2), activation.roll(stride, 2))
    assert relative_rms(layer(moved).pose[:, :, 1:], before[:, :, :-1]) < CLOSE
    assert relative_rms(layer(moved).pose, before) > 1e-3  # a constant layer would pass the lines above


@over(CASES, n=80)
def test_couplings_sum_to_one_over_the_axis_of_the_paper_only(case: Case) -> None:
    layer, children = case.layer(), case.children()
    _, trace = layer(children, trace=True)
    assert len(trace.states) == case.routing.iterations
    for coupling in trace.couplings:
        over_parents, over_children = coupling.sum(-1), coupling.sum(-2)
        if case.routing.coupling_axis == "children":
            assert relative_rms(over_children, torch.ones_like(over_children)) < CLOSE
            assert relative_rms(over_parents, torch.ones_like(over_parents)) > 1e-3
            continue
        if case.routing.competition == "global" and case.geometry != "dense":
            index = layer._wiring(children).index()
            flat = over_parents.flatten(1)
            total = torch.zeros(2, int(index.max()) + 1, dtype=flat.dtype)
            inside = index.flatten() >= 0
            over_parents = total.index_add(1, index.flatten()[inside], flat[:, inside])
            over_parents = over_parents[:, index.unique()[index.unique() >= 0]]
        deviation = relative_rms(over_parents, torch.ones_like(over_parents))
        if case.routing.coupling_axis is None:
            assert deviation > 1e-3
        elif getattr(case.routing, "leak", False):
            assert float(over_parents.detach().max()) < 1
        else:
            assert deviation < CLOSE
        assert relative_rms(over_children, torch.ones_like(over_children)) > 1e-3
