"""What the layers and what stands around them do beyond the contract."""

import pytest
import torch
import torch.nn.functional as F

from tests.tolerances import EXACT
from torchcaps import Capsules, route
from torchcaps.losses import MarginLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import (
    CapsuleActivation,
    CapsuleStack,
    ConvCapsules,
    Decoder,
    DenseCapsules,
    ExpSquash,
    PrimaryCapsules,
    Squash,
    exp_squash,
    length,
    squash,
)
from torchcaps.nn.sizes import as_rows
from torchcaps.routing import EM, Dynamic, Geometry, InvertedAttention, Routing, Uniform
from torchcaps.routing.base import ROUTINGS
from torchcaps.votes import Wiring, same_padding
from torchcaps.votes.competition import softmax, uniform


def test_names_stand_for_routings() -> None:
    assert DenseCapsules(6, 4, 3, 4, routing="em").routing == EM()


def test_a_grid_is_flattened_by_rows_columns_types() -> None:
    layer = DenseCapsules(24, 4, 3, 4, routing=Uniform())
    capsules = Capsules(torch.randn(2, 4, 3, 2, 4), torch.rand(2, 4, 3, 2))
    flat = capsules.flatten()
    assert torch.equal(flat.pose[:, (1 * 3 + 2) * 2 + 1], capsules.pose[:, 1, 2, 1])
    assert torch.equal(layer(capsules).pose, layer(flat).pose)


def test_vector_votes_are_a_matrix_times_a_vector() -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=Uniform()).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    assert torch.allclose(votes[1, 4, 2], layer.weight[4, :, 2].T @ pose[1, 4], atol=EXACT)


def test_matrix_votes_are_a_pose_times_a_matrix() -> None:
    layer = DenseCapsules(6, 9, 3, 9, routing=Uniform(), pose="matrix").double()
    pose = torch.randn(2, 6, 9, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    expected = pose[1, 4].view(3, 3) @ layer.weight[4, :, 2]
    assert torch.allclose(votes[1, 4, 2].view(3, 3), expected, atol=EXACT)
    assert layer.weight.shape == (6, 3, 3, 3)


def test_route_and_layer_agree() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=Dynamic(3, prior=True)).double()
    layer.coefficients["prior"].data.normal_()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    found = route(layer.votes(pose).dense(), layer.routing, coefficients=layer.coefficients.named())
    assert torch.allclose(found.pose, layer(pose).pose, atol=EXACT)


@pytest.mark.parametrize("streamed", [True, False])
def test_weights_may_be_shared_by_type_or_kept_for_every_position(streamed: bool) -> None:
    pose = torch.randn(2, 5, 4, 2, 4, dtype=torch.float64, requires_grad=True)
    sizes, options = (2, 4, 3, 4, 3), {"routing": Dynamic(2), "streamed": streamed}
    kernel = ConvCapsules(*sizes, **options).double()
    position = ConvCapsules(*sizes, weights="position", grid=(5, 4), **options).double()
    assert position.weight.shape == (3, 2, 18, 4, 3, 4)
    position.weight.data.copy_(kernel.weight.detach().expand_as(position.weight))
    assert torch.allclose(position(pose).pose, kernel(pose).pose, atol=EXACT)
    one, other = (torch.autograd.grad(layer(pose).pose.sum(), layer.weight)[0] for layer in (kernel, position))
    assert torch.allclose(other.sum((0, 1)), one, atol=1e-10)
    position.weight.data[1, 0] += 1  # the weight of one place changes that place alone
    changed = (position(pose).pose - kernel(pose).pose).abs().amax((0, 3, 4)) > 1e-6
    assert changed.nonzero().tolist() == [[1, 0]]

    by_type = ConvCapsules(*sizes, weights="type", **options).double()
    kernel.weight.data.copy_(by_type.weight.detach().repeat(9, 1, 1, 1))
    assert by_type.weight.shape == (2, 4, 3, 4)
    assert torch.allclose(by_type(pose).pose, kernel(pose).pose, atol=EXACT)


def test_attention_shares_weights_by_type_too() -> None:
    by_type = ConvCapsules(2, 4, 3, 4, 3, routing="attention", weights="type").eval()
    kernel = ConvCapsules(2, 4, 3, 4, 3, routing="attention").eval()
    kernel.load_state_dict(by_type.state_dict() | {"weight": by_type.weight.detach().repeat(1, 9, 1, 1)})
    pose = torch.randn(2, 5, 4, 2, 4)
    assert torch.allclose(by_type(pose).pose, kernel(pose).pose, atol=1e-6)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(28, 3, 2), (7, 3, 2), (5, 5, 1), (9, 2, 3), (4, 1, 2)])
def test_trap_51_same_padding_is_tensorflows(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel, stride)
    assert after - before in (0, 1)
    assert (size + before + after - kernel) // stride + 1 == -(-size // stride)
    if (size, kernel, stride) == (28, 3, 2):
        assert (before, after) == (0, 1)


def test_trap_51_primary_capsules_pad_behind() -> None:
    primary = PrimaryCapsules(3, 2, 4, 3, 2, "same", activation="none").double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    convolution = F.conv2d(F.pad(images, (0, 1, 0, 1)), primary.pose.weight, primary.pose.bias, stride=2)
    found = primary(images).pose
    assert torch.allclose(found.permute(0, 3, 4, 1, 2).flatten(1, 2), convolution, atol=EXACT)
    shifted = F.conv2d(images, primary.pose.weight, primary.pose.bias, stride=2, padding=1)
    assert not torch.allclose(found.permute(0, 3, 4, 1, 2).flatten(1, 2), shifted)


def test_a_window_reads_the_same_by_index_and_by_views() -> None:
    wiring = Wiring(3, (6, 5), (3, 2), (2, 1), (1, 0, 0, 1))
    x = torch.randn(2, 6, 5, 3, 4)
    gathered = wiring.gather(x)
    padded = wiring.pad(x)
    for start, stop in wiring.pieces(2):
        (view,) = wiring.windows(padded, start, stop)
        assert torch.equal(view, gathered[:, :, :, start:stop])
    assert gathered.shape == (2, *wiring.sites, wiring.n_slots, 4)
    assert torch.equal(wiring.unpad(padded), x)


@pytest.mark.parametrize(
    ("name", "function"), [("squash", squash), ("exp_squash", exp_squash), ("none", lambda pose: pose)]
)
def test_primary_activations(name: str, function: object) -> None:
    torch.manual_seed(0)
    plain = PrimaryCapsules(3, 2, 4, 3, activation="none")
    named = PrimaryCapsules(3, 2, 4, 3, activation=name)  # type: ignore[arg-type]
    named.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 6, 6)
    assert torch.equal(named(images).pose, function(plain(images).pose))  # type: ignore[operator]


def test_primary_relu_norm_tanh_and_activations() -> None:
    images = torch.randn(2, 3, 6, 6)
    assert float(PrimaryCapsules(3, 2, 4, 3, relu=True, activation="none")(images).pose.detach().min()) == 0
    normed = PrimaryCapsules(3, 2, 4, 3, activation="layer_norm")(images).pose.detach()
    assert torch.allclose(normed.mean(-1), torch.zeros(2, 4, 4, 2), atol=1e-5)
    tanh = PrimaryCapsules(3, 2, 4, 3, activation="capsule")
    assert isinstance(tanh.activation, CapsuleActivation)
    assert float(tanh(images).pose.detach().abs().max()) < 1
    active = PrimaryCapsules(3, 2, 4, 3, activation=Squash(), activations=True)(images)
    assert active.activation is not None
    assert active.activation.shape == (2, 4, 4, 2)
    assert isinstance(PrimaryCapsules(3, 2, 4, 3, activation="exp_squash").activation, ExpSquash)


def test_capsule_activation_is_a_map_for_each_type() -> None:
    module = CapsuleActivation(3, 4).double()
    module.offset.data.normal_()
    pose = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    found = module(pose)
    expected = torch.tanh(pose[1, 2, 2] @ module.matrix[2] + module.offset[2])
    assert torch.allclose(found[1, 2, 2], expected, atol=EXACT)
    assert sum(p.numel() for p in module.parameters()) == 3 * (4 * 4 + 4)


def test_the_decoder_decodes_the_longest_without_labels() -> None:
    decoder = Decoder(5, 4, (2, 3, 3), hidden=(7, 6))
    pose = torch.randn(3, 5, 4)
    order = Capsules(pose).length().argsort(-1, descending=True)
    assert torch.equal(decoder(pose), decoder(pose, order[:, 0]))
    assert torch.allclose(decoder(pose, top=2), decoder(pose, order[:, :2]))
    assert decoder(pose, top=1).shape == (3, 1, 2, 3, 3)
    on_grid = pose.unflatten(1, (1, 1, 5))
    assert torch.equal(decoder(on_grid), decoder(pose))  # the class layer may be a convolution


def test_init_can_be_chosen() -> None:
    layer = DenseCapsules(100, 8, 10, 16, routing="dynamic", init=0.02)
    assert abs(float(layer.weight.detach().std()) - 0.02) < 1e-3
    ones = DenseCapsules(10, 8, 10, 16, routing="dynamic", init=torch.nn.init.ones_)
    assert torch.all(ones.weight == 1)


def test_layers_print_what_they_are() -> None:
    assert "6 x 4 -> 3 x 4" in str(DenseCapsules(6, 4, 3, 4, routing=Dynamic(2)))
    text = str(ConvCapsules(6, 4, 3, 4, 3, 2, "same", routing=Dynamic(2)))
    assert "kernel_size=(3, 3)" in text
    assert "Dynamic(iterations=2" in text


def test_rows_of_a_pose() -> None:
    assert [as_rows("vector", 8, 16), as_rows("matrix", 16, 16), as_rows(2, 8, 12)] == [1, 4, 2]


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_memory_layout_does_not_matter(layout: str) -> None:
    layer = ConvCapsules(2, 4, 3, 4, 3, routing="dynamic", streamed=True).double()
    pose = torch.randn(2, 5, 5, 2, 4, dtype=torch.float64)
    other = (
        pose.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
        if layout == "channels_last"
        else pose.transpose(1, 2).contiguous().transpose(1, 2)
    )
    assert not other.is_contiguous()
    one, two = (x.requires_grad_() for x in (pose, other))
    assert torch.allclose(layer(one).pose, layer(two).pose, atol=EXACT)
    gradients = [torch.autograd.grad(layer(x).pose.sum(), x)[0] for x in (one, two)]
    assert torch.allclose(*gradients, atol=EXACT)


@pytest.mark.parametrize(("relu", "name"), [(True, "squash"), (True, "exp_squash"), (False, "squash")])
def test_primary_capsules_by_hand(relu: bool, name: str) -> None:
    """Pose and activity on an oblong grid, with an oblong window and padding that differs by side."""
    primary = PrimaryCapsules(
        3,
        2,
        4,
        (3, 3),
        (2, 1),
        "same",
        relu=relu,
        activation=name,
        activations=True,  # type: ignore[arg-type]
    ).double()
    images = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    padded = F.pad(images, (1, 1, 0, 1))  # columns: one on each side; rows: one behind
    channels = F.conv2d(padded, primary.pose.weight, primary.pose.bias, stride=(2, 1))
    channels = channels.relu() if relu else channels
    function = {"squash": squash, "exp_squash": exp_squash}[name]
    expected = function(channels.unflatten(1, (2, 4)).permute(0, 3, 4, 1, 2))
    found = primary(images)
    assert found.pose.shape == (2, 3, 5, 2, 4)
    assert torch.allclose(found.pose, expected, atol=EXACT)
    activity = torch.sigmoid(F.conv2d(padded, primary.activity.weight, primary.activity.bias, stride=(2, 1)))  # type: ignore[union-attr]
    assert torch.allclose(found.activation, activity.permute(0, 2, 3, 1), atol=EXACT)


@pytest.mark.parametrize("training", [True, False])
def test_the_decoder_by_hand(training: bool) -> None:
    decoder = Decoder(3, 4, (2, 3, 3), hidden=(7, 6)).double().train(training)
    pose = torch.randn(2, 3, 4, dtype=torch.float64)
    labels = Capsules(pose).length().argmin(-1)  # not what the decoder would predict
    kept = torch.zeros_like(pose)
    for image, label in enumerate(labels.tolist()):
        kept[image, label] = pose[image, label]
    first, second, last = (decoder.layers[number] for number in (0, 2, 4))
    expected = torch.sigmoid(last(second(first(kept.flatten(1)).relu()).relu())).view(2, 2, 3, 3)
    assert torch.allclose(decoder(pose, labels), expected, atol=EXACT)


def test_the_decoder_predicts_by_activation_where_there_is_one() -> None:
    decoder = Decoder(3, 4, (1, 3, 3), hidden=(5,))
    pose = torch.ones(1, 3, 4) * torch.tensor([3.0, 1.0, 2.0]).view(1, 3, 1)
    active = Capsules(pose, torch.tensor([[0.1, 0.9, 0.2]]))
    assert torch.equal(decoder(active), decoder(pose, torch.tensor([1])))
    assert torch.equal(decoder(pose), decoder(pose, torch.tensor([0])))
    assert decoder.predict(pose).tolist() == [0]
    assert torch.equal(decoder(pose.double()), decoder(pose))  # in the dtype of its weights


def test_long_vectors_are_squashed_to_one_in_half_precision() -> None:
    for dtype, size in {torch.float16: 200.0, torch.bfloat16: 1e18, torch.float32: 1e18}.items():
        pose = torch.full((4,), size, dtype=dtype, requires_grad=True)
        found = squash(pose)
        assert abs(float(length(found).detach()) - 1) < 0.01
        found.sum().backward()
        assert torch.isfinite(pose.grad).all()


def test_votes_and_stacks_keep_out_of_autocast() -> None:
    pose = torch.randn(2, 6, 4)
    for streamed in (True, False):
        layers = [
            DenseCapsules(a, 4, b, 4, routing="inverted_attention", streamed=streamed) for a, b in [(6, 5), (5, 3)]
        ]
        for module in (CapsuleStack(layers), CapsuleStack(layers, "sequential")):
            expected = module(pose).pose
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(module(pose).pose, expected)
        votes = layers[0].votes(pose)
        coupling = torch.rand(2, 6, 5)
        query, kernel = torch.rand(2, 5, 4), torch.rand(5, 6, 6, 4)
        plain = [votes.sum(coupling), votes.dot(query), votes.mix(kernel), votes.dense()]
        with torch.autocast("cpu", torch.bfloat16):
            votes = layers[0].votes(pose)
            shielded = [votes.sum(coupling), votes.dot(query), votes.mix(kernel), votes.dense()]
            routed = route(votes.dense(), "dynamic").pose
        assert routed.dtype == torch.float32
        for one, other in zip(plain, shielded, strict=True):
            assert torch.equal(one, other)
        weight = layers[0].weight
        gradients = [torch.autograd.grad(layers[0](pose).pose.square()[..., 0].sum(), weight)[0]]
        with torch.autocast("cpu", torch.bfloat16):
            gradients += torch.autograd.grad(layers[0](pose).pose.square()[..., 0].sum(), weight)
        if streamed:
            assert torch.equal(*gradients)


def test_a_stack_keeps_no_more_than_it_is_asked_for() -> None:
    """Without a trace the steps that only a trace would show are not taken; the result is the same."""
    torch.manual_seed(0)
    routing = InvertedAttention(4)
    sizes = [(6, 5), (5, 4), (4, 3)]
    stack = CapsuleStack([DenseCapsules(a, 4, b, 4, routing=routing) for a, b in sizes]).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    parents, traces = stack(pose, trace=True)
    assert torch.equal(stack(pose).pose, parents.pose)
    assert [len(trace.states) for trace in traces] == [4, 4, 4]
    assert "schedule='concurrent'" in repr(stack)


def test_a_leak_with_global_competition_by_brute_force() -> None:
    """The softmax over all parents of a child and one place for none of them."""
    wiring = Wiring(2, (4, 3), (3, 2), (1, 1), (1, 0, 0, 0), competition="global")
    logits = torch.randn(2, *wiring.sites, wiring.n_slots, 3, dtype=torch.float64)
    index = wiring.index().flatten()
    for leak in (True, False):
        found = softmax(logits, wiring, leak).flatten(1, 3)
        flat = logits.flatten(1, 3)
        zero = uniform(wiring, 3, logits, leak).expand(logits.shape).flatten(1, 3)
        for child in index.unique().tolist():
            mine = (index == child).nonzero().flatten()
            rivals = flat[:, mine].flatten(1)
            extra = torch.zeros(2, int(leak), dtype=torch.float64)
            expected = torch.cat([extra, rivals], 1).softmax(1)[:, int(leak) :].view(2, len(mine), 3)
            assert torch.allclose(found[:, mine], expected, atol=EXACT)
            assert torch.allclose(zero[:, mine], torch.ones(()).double() / (3 * len(mine) + leak), atol=EXACT)


def test_votes_may_have_a_bias_and_an_offset() -> None:
    with ROUTINGS.restored():

        class Both(Routing):
            """Uniform coupling with a vote bias and a constant offset."""

            vote_bias = True
            step = Uniform.step

            def vote_offset(self, geometry: Geometry, wiring: Wiring, like: torch.Tensor) -> torch.Tensor:
                return torch.full((1, 1, geometry.dim), 2.0, dtype=like.dtype)

        layer = DenseCapsules(6, 4, 3, 4, routing=Both())
        layer.bias.data.normal_()
        votes = layer.votes(torch.zeros(1, 6, 4)).dense()[0]
        torch.testing.assert_close(votes, layer.bias + 2, rtol=0, atol=0)


def test_losses_say_their_settings() -> None:
    assert repr(MarginLoss(0.7)) == "MarginLoss(positive=0.7, negative=0.1, down_weight=0.5, reduction='paper')"
    assert "steps=50000" in repr(SpreadLoss())
    assert "weight=0.3" in repr(ReconstructionLoss("mean", 0.3))
