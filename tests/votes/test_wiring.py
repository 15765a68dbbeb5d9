"""Random geometries: windows equal torch's convolution, streamed votes equal stored votes."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tolerances import SAME, STREAMED, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules
from torchcaps.routing import EM, Uniform
from torchcaps.votes import Wiring

small = st.integers(1, 3)


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    grid = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    kernel, stride = draw(st.tuples(small, small)), draw(st.tuples(small, small))
    padding = draw(st.one_of(st.just("same"), st.tuples(st.integers(0, 2), st.integers(0, 2))))
    if padding != "same":
        assume(all(k <= g + 2 * p for k, g, p in zip(kernel, grid, padding, strict=True)))
    return {"grid": grid, "kernel_size": kernel, "stride": stride, "padding": padding}


@settings(deadline=None, max_examples=60, derandomize=True)
@given(geometries(), small, small)
def test_sum_of_votes_equals_a_convolution(geometry: dict[str, Any], types: int, parents: int) -> None:
    """With uniform coupling and vector poses, a capsule layer before its squash is a convolution over J."""
    layer = ConvCapsules(types, 2, parents, 3, routing=Uniform(), **geometry).double()
    pose = torch.randn(2, *geometry["grid"], types, 2, dtype=torch.float64)
    votes = layer.votes(pose)
    found = votes.sum(torch.ones((), dtype=torch.float64).expand(votes.shape[:-1]))
    kernel = layer.weight.detach().unflatten(0, (*geometry["kernel_size"], types))  # [k, l, n, x, j, y]
    kernel = kernel.permute(4, 5, 2, 3, 0, 1).reshape(parents * 3, types * 2, *geometry["kernel_size"])
    top, bottom, left, right = layer._wiring(Capsules(pose)).padding
    image = F.pad(pose.permute(0, 3, 4, 1, 2).flatten(1, 2), (left, right, top, bottom))
    expected = F.conv2d(image, kernel, stride=geometry["stride"]).unflatten(1, (parents, 3)).permute(0, 3, 4, 1, 2)
    assert relative_rms(found, expected) < SAME[torch.float64]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(geometries(), small, st.sampled_from(["local", "global"]))
def test_streamed_equals_stored_for_any_geometry(geometry: dict[str, Any], types: int, competition: Any) -> None:
    routing = EM(2, competition=competition)
    results = []
    for streamed in (False, True):
        torch.manual_seed(0)
        layer = ConvCapsules(types, 4, 2, 4, routing=routing, pose="matrix", streamed=streamed, **geometry).double()
        pose = torch.randn(2, *geometry["grid"], types, 4, dtype=torch.float64, requires_grad=True)
        out = layer(Capsules(pose, torch.rand(pose.shape[:-1], dtype=torch.float64)))
        results.append([out.pose, *torch.autograd.grad(out.pose.sum() + out.activation.sum(), [pose, layer.weight])])
    for stored, found in zip(*results, strict=True):
        assert relative_rms(found, stored) < STREAMED[torch.float64]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(geometries(), small)
def test_slots_read_the_children_of_their_window(geometry: dict[str, Any], types: int) -> None:
    """Give each child a unique value and compare what every slot reads."""
    layer = ConvCapsules(types, 1, 1, 1, routing=Uniform(), **geometry)
    height, width = geometry["grid"]
    numbers = torch.arange(1, height * width * types + 1).view(1, height, width, types, 1).float()
    wiring: Wiring = layer._wiring(Capsules(numbers))
    read = wiring.gather(numbers)[0, ..., 0]
    top, _, left, _ = wiring.padding
    rows, columns = wiring.sites
    assert rows >= 1
    for row in range(rows):
        for column in range(columns):
            slot = 0
            for k in range(wiring.kernel[0]):
                for c in range(wiring.kernel[1]):
                    h, w = row * wiring.stride[0] + k - top, column * wiring.stride[1] + c - left
                    for n in range(types):
                        inside = 0 <= h < height and 0 <= w < width
                        assert read[row, column, slot] == (numbers[0, h, w, n, 0] if inside else 0)
                        slot += 1
