"""Transposed convolutional capsules: votes equal a transposed convolution, parents equal loops over all children."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.contract.reference import reference_module, routing_coefficients, to_lists
from tests.reference.sites import Site, matrix_vote, weight_of
from tests.tolerances import REFERENCE, SAME, largest_difference, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import TransposedConvCapsules
from torchcaps.routing import EM, Dynamic, InvertedAttention, Routing, SelfAttention, Trainable, Uniform

GEOMETRIES = [((3, 3), (2, 2), (1, 1), (1, 0)), ((2, 3), (1, 2), (0, 1), (0, 0)), ((2, 2), (3, 2), (0, 0), (2, 1))]


def loop_parents(layer: TransposedConvCapsules, children: Capsules) -> list[list[Any]]:
    """Route by loops: each child votes for the parents at ``h * stride + k - padding``."""
    values = to_lists(layer, children)
    (kernel, stride, cut) = layer.kernel_size, layer.upsampling, layer.cut
    options = {field.name: getattr(layer.routing, field.name) for field in dataclasses.fields(layer.routing)}
    types, parents = layer.geometry.types, layer.geometry.parents
    images = []
    for pose, activation in zip(values["children.pose"], values["children.activation"], strict=True):
        rows, columns = (
            (size - 1) * s - 2 * p + k + o
            for size, s, p, k, o in zip(
                (len(pose), len(pose[0])), stride, cut, kernel, layer.output_padding, strict=True
            )
        )
        sites = {(r, c): Site([], [], [], [], (r, c)) for r in range(rows) for c in range(columns)}
        for h in range(len(pose)):
            for w in range(len(pose[0])):
                for k in range(kernel[0]):
                    for l in range(kernel[1]):  # noqa: E741
                        site = sites.get((h * stride[0] + k - cut[0], w * stride[1] + l - cut[1]))
                        for n in range(types if site is not None else 0):
                            slot = (k * kernel[1] + l) * types + n
                            matrices = [weight_of(values["weight"], slot, j) for j in range(parents)]
                            assert site is not None
                            site.votes.append([matrix_vote(pose[h][w][n], m, layer.geometry.rows) for m in matrices])
                            site.child.append((h, w, n))
                            site.activation.append(activation[h][w][n])
        module = reference_module(type(layer.routing).name())
        zero = [[0.0] * layer.geometry.dim] * parents
        for site in sites.values():
            if not site.votes:  # a position that no child reaches
                site.votes, site.child, site.activation = [zero], [None], [0.0]
        images.append(module.route(list(sites.values()), routing_coefficients(values), **options))
    return images


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["same", "mixed", "gaps"])
@pytest.mark.parametrize("routing", [Dynamic(2), EM(2), InvertedAttention(2)], ids=lambda r: r.name())
def test_parents_equal_loops(routing: Routing, geometry: tuple[Any, ...], streamed: bool) -> None:
    torch.manual_seed(0)
    layer = TransposedConvCapsules(2, 4, 3, 4, *geometry, routing=routing, pose="matrix", streamed=streamed).double()
    children = Capsules(torch.randn(2, 3, 2, 2, 4).double(), torch.rand(2, 3, 2, 2).double())
    parents = layer(children)
    images = loop_parents(layer, children)
    expected = torch.tensor([[site.pose for site in sites] for sites in images], dtype=torch.float64)
    assert largest_difference(parents.pose, expected.view_as(parents.pose)) < REFERENCE
    if parents.activation is not None:
        activation = torch.tensor([[site.activation for site in sites] for sites in images], dtype=torch.float64)
        assert largest_difference(parents.activation, activation.view_as(parents.activation)) < REFERENCE


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["same", "mixed", "gaps"])
def test_sum_of_votes_equals_transposed_convolution(geometry: tuple[Any, ...]) -> None:
    kernel, stride, padding, output_padding = geometry
    layer = TransposedConvCapsules(2, 3, 4, 5, *geometry, routing=Uniform(), grid=(4, 3)).double()
    pose = torch.randn(2, 4, 3, 2, 3, dtype=torch.float64)
    votes = layer.votes(pose).dense().sum(-3)  # [B, *L, J, D]
    weight = layer.weight.unflatten(0, (*kernel, 2)).permute(2, 3, 4, 5, 0, 1)  # [N, K, J, D, k0, k1]
    images = pose.permute(0, 3, 4, 1, 2).flatten(1, 2)
    expected = F.conv_transpose2d(images, weight.flatten(2, 3).flatten(0, 1), None, stride, padding, output_padding)
    expected = expected.unflatten(1, (4, 5)).permute(0, 3, 4, 1, 2)
    assert relative_rms(votes, expected) < SAME[torch.float64]


def test_other_routings_weights_and_bad_input() -> None:
    options: dict[str, Any] = {"kernel_size": 3, "stride": 2, "grid": (3, 2)}
    for routing, weights in ((Trainable(), "kernel"), (SelfAttention(), "position"), ("attention", "type")):
        layer = TransposedConvCapsules(2, 4, 3, 4, **options, routing=routing, weights=weights)
        assert layer(torch.randn(2, 3, 2, 2, 4)).pose.shape == (2, 7, 5, 3, 4)
        assert "stride=(2, 2)" in repr(layer)
    with pytest.raises(ValueError, match=r"grid \[3, 2\].*got \[4, 2\]"):
        layer(torch.randn(2, 4, 2, 2, 4))
    with pytest.raises(ValueError, match="output_padding must be less than stride"):
        TransposedConvCapsules(2, 4, 3, 4, 3, output_padding=1, routing="em")
    with pytest.raises(ValueError, match="padding must be less than kernel_size"):
        TransposedConvCapsules(2, 4, 3, 4, 3, padding=3, routing="em")
