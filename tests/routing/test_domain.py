"""Domain of the routings: finite values and gradients for extreme finite inputs, or an error, on both vote paths."""

import pytest
import torch

from tests.tolerances import assert_all_equal, assert_finite
from torchcaps import route
from torchcaps._core.validation import DomainError, check_magnitude
from torchcaps.capsules import Capsules
from torchcaps.functional import exp_squash
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Dynamic, HeinsenEM, InvertedAttention, KMeans, Routing, Trainable, Uniform

LIMITED = {
    "uniform": Uniform(),
    "dynamic": Dynamic(3),
    "dynamic five iterations": Dynamic(5),
    "dynamic without gradient of couplings": Dynamic(5, gradient="last"),
    "em": EM(2),
    "em five iterations": EM(5),
    "em without floor": EM(3, variance_floor=0.0),
    "inverted attention": InvertedAttention(3),
    "inverted attention, activations": InvertedAttention(2, activations=True),
    "inverted attention, no LayerNorm": InvertedAttention(5, normalize=False),
}
over_paths = pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])


def assert_finite_results(layer: DenseCapsules, pose: torch.Tensor, activation: torch.Tensor | None = None) -> None:
    """Fail if the parents, or the gradients of children and weights, are not finite."""
    children = Capsules(pose.clone().requires_grad_(), None if activation is None else activation.requires_grad_())
    parents = layer(children)
    outputs = {"pose": parents.pose, "activation": parents.activation}
    outputs = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    # Different directions for all values: with equal ones, gradients through a softmax cancel.
    directions = [torch.arange(tensor.numel()).view(tensor.shape).cos() for tensor in outputs.values()]
    torch.autograd.backward(list(outputs.values()), directions)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    gradients |= {f"gradient of {name}": x.grad for name, x in children._asdict().items() if x is not None}
    for name, tensor in {**outputs, **gradients}.items():
        if tensor is not None:
            assert_finite(tensor, name)


def make_layer(routing: Routing, streamed: bool, equal_parents: bool, children: int = 6) -> DenseCapsules:
    """Return a layer with weights of at most 1; equal parents have equal logits, whose softmax is not saturated."""
    torch.manual_seed(0)
    layer = DenseCapsules(children, 4, 3, 4, routing=routing, streamed=streamed)
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        if equal_parents:
            layer.weight.copy_(layer.weight[:, :, :1].expand_as(layer.weight))
        layer.weight[0, 0, 0, 0] = 1.0
    return layer


@over_paths
@pytest.mark.parametrize("equal_parents", [False, True], ids=["different", "equal"])
@pytest.mark.parametrize("routing", LIMITED.values(), ids=LIMITED)
def test_results_are_finite_up_to_the_limit_and_rejected_above(
    routing: Routing, equal_parents: bool, streamed: bool
) -> None:
    layer = make_layer(routing, streamed, equal_parents)
    limit = routing.max_vote(torch.float32)
    assert limit is not None
    pose = torch.rand(20, 6, 4) * 2 - 1
    pose[0, 0, 0] = 1.0  # 4 columns: votes may reach 4
    assert_finite_results(layer, pose * (0.99 * limit / 4))
    for scale in (1.01 * limit / 4, 1e15, 1e30):
        with pytest.raises(DomainError, match=r"capsules or weight .* float32"):
            layer(pose * scale)
    with torch.no_grad():
        layer.weight.mul_(1e30)
    with pytest.raises(DomainError):
        layer(pose)


@over_paths
@pytest.mark.parametrize("routing", [Dynamic(2), Dynamic(3), Dynamic(5), KMeans(2), KMeans(3)], ids=str)
def test_tied_parents_whose_votes_cancel_are_finite(routing: Routing, streamed: bool) -> None:
    """Sums near 0 are not divided by their length, and couplings of equal logits are not saturated."""
    layer = make_layer(routing, streamed, equal_parents=True)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.sign())
    limit = layer.routing.max_vote(torch.float32)
    assert limit is not None
    pose = torch.ones(4, 6, 4)
    pose[:, ::2] = -1
    pose[0, 0] += 1e-6
    assert_finite_results(layer, pose * (0.99 * limit / 4))
    for scale in (1e17, 1e19):  # lengths of sums above 1e19 are infinite in float32, and their squash is 0
        with pytest.raises(DomainError):
            layer(pose * scale)


@over_paths
@pytest.mark.parametrize("equal_parents", [False, True], ids=["different", "equal"])
@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-20, 1e-16, 2e-12])
def test_em_is_finite_for_tiny_activations_and_large_votes(size: float, equal_parents: bool, streamed: bool) -> None:
    """Means are divided by the sum of activations, but at least by 1e-10."""
    for routing in (EM(2), EM(5), EM(3, variance_floor=0.0), InvertedAttention(2, activations=True)):
        layer = make_layer(routing, streamed, equal_parents)
        limit = routing.max_vote(torch.float32)
        assert limit is not None
        pose = torch.rand(20, 6, 4) * 2 - 1
        for scale in (1.0, 1e3, 0.2 * limit):
            assert_finite_results(layer, pose * min(scale, 0.2 * limit), torch.full((20, 6), size))


def test_limit_counts_small_factors_as_one() -> None:
    """Tiny weights do not permit huge children: the gradient of the weights contains the children."""
    layer = make_layer(Dynamic(3), False, False)
    with torch.no_grad():
        layer.weight.mul_(1e-20)
    with pytest.raises(DomainError):
        layer(torch.full((1, 6, 4), 1e20))
    with pytest.raises(DomainError):
        layer(Capsules(torch.ones(1, 6, 4), torch.full((1, 6), 1e15)))


def test_route_rejects_votes_above_the_limit() -> None:
    votes = torch.randn(2, 6, 3, 4)
    for routing in LIMITED.values():
        with pytest.raises(DomainError, match=type(routing).__name__):
            route(votes * 1e15, routing)
        route(votes.double() * 1e15, EM(2))  # a wider dtype
    assert EM(2).max_vote(torch.float16) is None
    assert InvertedAttention(1, normalize=False).max_vote(torch.float32) == 1e10
    assert Dynamic(9).max_vote(torch.float32) == 1e3


@over_paths
def test_em_without_floor_is_finite_for_a_single_child(streamed: bool) -> None:
    """The variance is 0: its logarithm and inverse are not finite."""
    for scale in (0.0, 1e-20, 1.0, 1e5):
        for children in (1, 2):
            layer = make_layer(EM(3, variance_floor=0.0), streamed, False, children)
            pose = torch.randn(20, 1, 4).expand(20, children, 4)
            assert_finite_results(layer, pose * scale)


def test_em_without_floor_in_a_convolution() -> None:
    layer = ConvCapsules(1, 4, 3, 4, 1, routing=EM(2, variance_floor=0.0), pose="matrix")
    parents = layer(torch.randn(2, 3, 3, 1, 4))
    assert_finite(parents.pose, "pose")
    assert_finite(parents.activation, "activation")


def test_variance_floor_is_unchanged_for_ordinary_votes() -> None:
    """The bound of the variance, the square of the machine epsilon, has no effect on votes that differ."""
    votes = torch.randn(2, 8, 3, 4, dtype=torch.float64)
    with_floor, without = (route(votes, EM(3, variance_floor=floor)) for floor in (1e-30, 0.0))
    torch.testing.assert_close(with_floor.pose, without.pose, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-41, 1.2e-38, 1e-30])
def test_squash_of_subnormal_poses_has_finite_gradients(size: float) -> None:
    """The Jacobian of the exponential squash at 0 is the identity; the inverse of 1e-41 is infinite in float32."""
    pose = torch.full((3, 1), size, requires_grad=True)
    squashed = exp_squash(pose)
    squashed.sum().backward()
    torch.testing.assert_close(squashed, pose, rtol=0, atol=0)
    torch.testing.assert_close(pose.grad, torch.ones(3, 1))
    votes = torch.full((1, 1, 3, 1), size, requires_grad=True)
    coefficients = {"coupling": torch.ones(1, 3)}
    route(votes, Trainable(relu="none"), coefficients=coefficients).pose.sum().backward()
    torch.testing.assert_close(votes.grad, torch.ones(1, 1, 3, 1))


def test_magnitude_is_not_checked_where_values_are_unknown() -> None:
    large = torch.full((2, 3), 5.0)
    with pytest.raises(DomainError, match=r"5\.0e\+00"):
        check_magnitude(1.0, "values", "large", large)
    check_magnitude(None, "values", "large", large)
    check_magnitude(1.0, "values", "large", large.to("meta"))
    check_magnitude(1.0, "values", "large", large[:0])

    def checked(x: torch.Tensor) -> torch.Tensor:
        check_magnitude(1.0, "values", "large", x)
        return 2 * x

    assert_all_equal(torch.vmap(checked)(large), 10.0)
    assert_all_equal(torch.vmap(torch.func.grad(lambda x: checked(x).sum()))(large), 2.0)


@pytest.mark.parametrize("routing", [KMeans(iterations=1000), HeinsenEM(iterations=1000)], ids=lambda r: r.name())
def test_limit_of_votes_for_many_iterations(routing: Routing) -> None:
    """The limit is a power whose factors overflow one by one."""
    assert [routing.max_vote(dtype) for dtype in (torch.float32, torch.float64)] == [1e3, 1e3]
