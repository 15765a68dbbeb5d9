"""Capsule layers: votes, sharing of weights, initialisation, memory layout, autocast."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.tolerances import EXACT, SAME, relative_rms
from torchcaps import Capsules, route
from torchcaps.nn import CapsuleStack, ConvCapsules, Decoder, DenseCapsules, PrimaryCapsules
from torchcaps.nn.sizes import as_rows
from torchcaps.routing import EM, Attention, Dynamic, Geometry, Quadratic, Routing, Uniform
from torchcaps.routing.base import ROUTINGS
from torchcaps.votes import Wiring


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)


def test_routing_may_be_given_by_name() -> None:
    assert DenseCapsules(6, 4, 3, 4, routing="em").routing == EM()


def test_grid_is_flattened_in_the_order_row_column_type() -> None:
    layer = DenseCapsules(24, 4, 3, 4, routing=Uniform())
    capsules = Capsules(torch.randn(2, 4, 3, 2, 4), torch.rand(2, 4, 3, 2))
    flat = capsules.flatten()
    assert_exact(flat.pose[:, (1 * 3 + 2) * 2 + 1], capsules.pose[:, 1, 2, 1])
    assert_exact(layer(capsules).pose, layer(flat).pose)


def test_vector_vote_is_matrix_times_pose() -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=Uniform()).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    assert_exact(votes[1, 4, 2], layer.weight[4, :, 2].T @ pose[1, 4])


def test_matrix_vote_is_pose_times_matrix() -> None:
    layer = DenseCapsules(6, 9, 3, 9, routing=Uniform(), pose="matrix").double()
    pose = torch.randn(2, 6, 9, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    assert_exact(votes[1, 4, 2].view(3, 3), pose[1, 4].view(3, 3) @ layer.weight[4, :, 2])
    assert layer.weight.shape == (6, 3, 3, 3)


def test_rows_of_a_pose() -> None:
    assert [as_rows("vector", 8, 16), as_rows("matrix", 16, 16), as_rows(2, 8, 12)] == [1, 4, 2]


def test_route_equals_layer() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=Dynamic(3, prior=True)).double()
    layer.coefficients["prior"].data.normal_()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    parents = route(layer.votes(pose).dense(), layer.routing, coefficients=layer.coefficients.named())
    assert_exact(parents.pose, layer(pose).pose)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "dense": partial(DenseCapsules, 6, 4, 3, 4, routing="attention"),
    "conv": partial(ConvCapsules, 2, 4, 3, 4, 3, routing=Quadratic(method="adam"), grid=(4, 4)),
    "primary": partial(PrimaryCapsules, 2, 3, 4, 3, activation="capsule", activations=True),
    "layer norm": partial(PrimaryCapsules, 2, 3, 4, 3, activation="layer_norm"),
    "decoder": partial(Decoder, 3, 4, (1, 5, 5), (7,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_device_and_dtype_of_parameters(name: str) -> None:
    torch.manual_seed(3)
    built = LAYERS[name](device="cpu", dtype=torch.float64)
    assert {p.dtype for p in built.parameters()} == {torch.float64}
    torch.manual_seed(3)
    default = LAYERS[name]()
    for key, tensor in default.state_dict().items():
        assert built.state_dict()[key].dtype == (torch.float64 if tensor.is_floating_point() else tensor.dtype)
    meta = LAYERS[name](device="meta", dtype=torch.bfloat16)
    assert all(t.is_meta for t in meta.state_dict().values())
    assert {p.dtype for p in meta.parameters()} == {torch.bfloat16}


def test_dropout_of_attention_is_a_module_that_can_be_changed() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=Attention(dropout=0.25))
    (found,) = (module for module in layer.modules() if isinstance(module, nn.Dropout))
    assert found.p == 0.25
    pose = torch.randn(2, 6, 4)
    expected = layer.eval()(pose).pose
    layer.train()
    found.p = 0.0
    assert_exact(layer(pose).pose, expected)
    layer.dropout = nn.Dropout(0.999999)
    assert_exact(layer(pose).pose, layer(torch.zeros_like(pose)).pose)
    assert DenseCapsules(6, 4, 3, 4, routing=Attention(dropout=0.0)).dropout is None


@pytest.mark.parametrize("streamed", [True, False])
def test_weights_per_position_equal_to_the_kernel_give_the_same_parents(streamed: bool) -> None:
    pose = torch.randn(2, 5, 4, 2, 4, dtype=torch.float64, requires_grad=True)
    sizes, options = (2, 4, 3, 4, 3), {"routing": Dynamic(2), "streamed": streamed}
    kernel = ConvCapsules(*sizes, **options).double()
    position = ConvCapsules(*sizes, weights="position", grid=(5, 4), **options).double()
    assert position.weight.shape == (3, 2, 18, 4, 3, 4)
    position.weight.data.copy_(kernel.weight.detach().expand_as(position.weight))
    assert_exact(position(pose).pose, kernel(pose).pose)
    of_kernel, of_positions = (
        torch.autograd.grad(layer(pose).pose.sum(), layer.weight)[0] for layer in (kernel, position)
    )
    assert relative_rms(of_positions.sum((0, 1)), of_kernel) < SAME[torch.float64]
    position.weight.data[1, 0] += 1  # changes one position only
    changed = (position(pose).pose - kernel(pose).pose).abs().amax((0, 3, 4)) > 1e-6
    assert changed.nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("streamed", [True, False])
def test_weights_per_type_equal_a_kernel_of_equal_cells(streamed: bool) -> None:
    pose = torch.randn(2, 5, 4, 2, 4, dtype=torch.float64)
    sizes, options = (2, 4, 3, 4, 3), {"routing": Dynamic(2), "streamed": streamed}
    by_type = ConvCapsules(*sizes, weights="type", **options).double()
    kernel = ConvCapsules(*sizes, **options).double()
    kernel.weight.data.copy_(by_type.weight.detach().repeat(9, 1, 1, 1))
    assert by_type.weight.shape == (2, 4, 3, 4)
    assert_exact(by_type(pose).pose, kernel(pose).pose)


def test_attention_shares_weights_per_type() -> None:
    by_type = ConvCapsules(2, 4, 3, 4, 3, routing="attention", weights="type").eval()
    kernel = ConvCapsules(2, 4, 3, 4, 3, routing="attention").eval()
    kernel.load_state_dict(by_type.state_dict() | {"weight": by_type.weight.detach().repeat(1, 9, 1, 1)})
    pose = torch.randn(2, 5, 4, 2, 4)
    torch.testing.assert_close(by_type(pose).pose, kernel(pose).pose, rtol=1e-5, atol=1e-6)


def test_init_is_a_standard_deviation_or_a_function() -> None:
    layer = DenseCapsules(100, 8, 10, 16, routing="dynamic", init=0.02)
    assert float(layer.weight.detach().std()) == pytest.approx(0.02, abs=1e-3)
    ones = DenseCapsules(10, 8, 10, 16, routing="dynamic", init=torch.nn.init.ones_)
    torch.testing.assert_close(ones.weight.detach(), torch.ones(10, 8, 10, 16), rtol=0, atol=0)


def test_repr_contains_sizes_and_routing() -> None:
    assert "6 x 4 -> 3 x 4" in str(DenseCapsules(6, 4, 3, 4, routing=Dynamic(2)))
    text = str(ConvCapsules(6, 4, 3, 4, 3, 2, "same", routing=Dynamic(2)))
    assert "kernel_size=(3, 3)" in text
    assert "Dynamic(iterations=2" in text


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_result_is_independent_of_memory_layout(layout: str) -> None:
    layer = ConvCapsules(2, 4, 3, 4, 3, routing="dynamic", streamed=True).double()
    contiguous = torch.randn(2, 5, 5, 2, 4, dtype=torch.float64)
    strided = (
        contiguous.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
        if layout == "channels_last"
        else contiguous.transpose(1, 2).contiguous().transpose(1, 2)
    )
    assert not strided.is_contiguous()
    for pose in (contiguous, strided):
        pose.requires_grad_()
    assert_exact(layer(strided).pose, layer(contiguous).pose)
    of_strided, of_contiguous = (torch.autograd.grad(layer(x).pose.sum(), x)[0] for x in (strided, contiguous))
    assert_exact(of_strided, of_contiguous)


@pytest.mark.parametrize("streamed", [True, False])
def test_votes_layers_and_stacks_ignore_autocast(streamed: bool) -> None:
    pose = torch.randn(2, 6, 4)
    layers = [DenseCapsules(a, 4, b, 4, routing="inverted_attention", streamed=streamed) for a, b in [(6, 5), (5, 3)]]
    for module in (CapsuleStack(layers), CapsuleStack(layers, "sequential")):
        expected = module(pose).pose
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(pose).pose, expected, rtol=0, atol=0)

    def reductions() -> list[torch.Tensor]:
        votes = layers[0].votes(pose)
        return [votes.sum(coupling), votes.dot(query), votes.mix(kernel), votes.dense()]

    coupling, query, kernel = torch.rand(2, 6, 5), torch.rand(2, 5, 4), torch.rand(5, 6, 6, 4)
    expected = reductions()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(reductions(), expected, rtol=0, atol=0)
        assert route(expected[-1], "dynamic").pose.dtype == torch.float32

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(layers[0](pose).pose.square()[..., 0].sum(), layers[0].weight)[0]

    if streamed:
        expected = gradient()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)


def test_votes_with_bias_and_offset() -> None:
    with ROUTINGS.restored():

        class BiasAndOffset(Routing):
            """Uniform coupling with a vote bias and a constant offset."""

            vote_bias = True
            step = Uniform.step

            def vote_offset(self, geometry: Geometry, wiring: Wiring, like: torch.Tensor) -> torch.Tensor:
                return torch.full((1, 1, geometry.dim), 2.0, dtype=like.dtype)

        layer = DenseCapsules(6, 4, 3, 4, routing=BiasAndOffset())
        layer.bias.data.normal_()
        votes = layer.votes(torch.zeros(1, 6, 4)).dense()[0]
        torch.testing.assert_close(votes, layer.bias + 2, rtol=0, atol=0)
