"""Traps of Yang 2021 (routing as a quadratic program) and its ascent step."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.reference import quadratic as reference
from tests.tolerances import EXACT, REFERENCE, assert_all_equal, assert_different, largest_difference
from torchcaps import Capsules, route
from torchcaps.nn import CapsuleStack, ConvCapsules, DenseCapsules, PrimaryCapsules, squash
from torchcaps.routing import Quadratic, RoutingDivergence


def make_class_layer(routing: Quadratic, children: int = 5, parents: int = 3, **options: Any) -> DenseCapsules:
    torch.manual_seed(0)
    layer = DenseCapsules(children, 4, parents, 4, routing=routing, init=0.5, **options).double()
    layer.coefficients["coefficient"].copy_(torch.randn(children, parents).double())
    return layer


def make_batch(children: int = 5, images: int = 6) -> torch.Tensor:
    return torch.randn(images, children, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
SIGNS = [[1.0 if j == label else -1.0 for j in range(3)] for label in LABELS.tolist()]


def test_trap_46_coefficients_are_global_and_not_zero() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Quadratic())
    assert layer.coefficients["coefficient"].shape == (1152, 10)
    assert_all_equal(layer.coefficients["coefficient"], 1)
    assert float(layer(torch.randn(2, 1152, 8)).length().detach().min()) > 0  # and inference needs no labels
    with pytest.raises(ValueError, match="initial"):
        Quadratic(initial=0.0)
    votes = torch.randn(2, 6, 3, 4)
    coefficient = torch.randn(6, 3)  # of any sign
    parents = route(votes, Quadratic(), coefficients={"coefficient": coefficient}).pose
    expected = squash((coefficient[..., None] * votes).sum(1))
    torch.testing.assert_close(parents, expected, rtol=0, atol=1e-6)


def make_small_layer(routing: Quadratic, coefficients: list) -> DenseCapsules:
    """Return a layer with one-dimensional poses; for poses 1, its two children vote (1, 2) and (3, -1)."""
    layer = DenseCapsules(2, 1, 2, 1, routing=routing).double()
    layer.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, -1.0]]).view(2, 1, 2, 1))
    layer.coefficients["coefficient"].copy_(torch.tensor(coefficients))
    return layer


def test_trap_47_ascent_step_by_hand() -> None:
    """One image of class 0: v = (b00 + 3 b10, 2 b01 - b11), F = v0² - v1²."""
    layer = make_small_layer(Quadratic(lr=0.1, penalty_weight=0.5), [[1.0, 1.0], [0.5, -2.0]])
    value = Quadratic.ascend(layer, torch.ones(1, 2, 1).double(), torch.tensor([0]))
    v0, v1 = 1 + 3 * 0.5, 2 * 1 + 2
    assert float(value) == pytest.approx(v0**2 - v1**2, abs=EXACT)
    expected = [
        [1 + 0.2 * (1 * v0 - 0.5 * 1), 1 + 0.2 * (-2 * v1 - 0.5 * 1)],
        [0.5 + 0.2 * (3 * v0 - 0.5 * 0.5), -2 + 0.2 * (1 * v1 + 0.5 * 2)],
    ]
    assert largest_difference(layer.coefficients["coefficient"], expected) < EXACT


@pytest.mark.parametrize("penalty", ["l2", "l1"])
def test_trap_47_step_equals_the_papers_and_increases_the_objective(penalty: Any) -> None:
    layer = make_class_layer(Quadratic(penalty, lr=1e-4, penalty_weight=0.3, reduction="sum"))
    pose = make_batch()
    votes = layer.votes(pose).dense().tolist()
    b = layer.coefficients["coefficient"].tolist()
    Quadratic.ascend(layer, pose, LABELS)
    updated = layer.coefficients["coefficient"].tolist()
    expected = reference.paper_step(votes, b, SIGNS, 1e-4, 0.3, penalty)
    assert largest_difference(layer.coefficients["coefficient"], expected) < REFERENCE
    before, after = (reference.objective_value(votes, x, SIGNS, 0.3, penalty) for x in (b, updated))
    assert after > before


@pytest.mark.parametrize("penalty", ["l2", "l1"])
def test_lambda_has_the_scale_of_the_equation_with_either_reduction(penalty: Any) -> None:
    """The mean over a batch divides the penalty as well: gamma of eq. 13 is the learning rate over the images."""
    pose = make_batch()
    layer = make_class_layer(Quadratic(penalty, lr=6e-4, penalty_weight=0.3, reduction="mean"))
    votes, b = layer.votes(pose).dense().tolist(), layer.coefficients["coefficient"].tolist()
    Quadratic.ascend(layer, pose, LABELS)
    expected = reference.paper_step(votes, b, SIGNS, 6e-4 / len(LABELS), 0.3, penalty)
    assert largest_difference(layer.coefficients["coefficient"], expected) < REFERENCE


@pytest.mark.parametrize("method", ["paper", "adam"])
def test_lr_factor_multiplies_the_learning_rate(method: Any) -> None:
    by_factor, by_lr = (make_class_layer(Quadratic(method=method, lr=lr)) for lr in (0.01, 0.0025))
    Quadratic.ascend(by_factor, make_batch(), LABELS, lr_factor=0.25)
    Quadratic.ascend(by_lr, make_batch(), LABELS)
    assert largest_difference(by_factor.coefficients["coefficient"], by_lr.coefficients["coefficient"]) < EXACT


def make_model(routing: Quadratic) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4).double(), make_class_layer(routing))


def test_recorded_children_replace_the_forward_pass() -> None:
    """Children of the forward passes, in two micro-batches, with the transforms at the time of the ascent."""
    recording, expected = make_model(Quadratic()), make_model(Quadratic())
    pose = make_batch()
    with Quadratic.record_children(recording) as children:
        for part in pose.split(4):
            recording(part)
    with torch.no_grad():
        for model in (recording, expected):
            model[1].weight.mul_(0.5)  # the descent changes the transforms ...
        recording[0].weight.zero_()  # ... and the layers below, which the ascent does not run again
    calls: list[str] = []
    recording[0].register_forward_pre_hook(lambda *_: calls.append("called"))
    value = children.ascend(LABELS)
    assert calls == []
    assert float(value) == pytest.approx(float(Quadratic.ascend(expected, pose, LABELS)), abs=EXACT)
    torch.testing.assert_close(recording[1].coefficients["coefficient"], expected[1].coefficients["coefficient"])
    recording(pose)  # after the context, nothing is recorded: the children would not fit the labels
    children.ascend(LABELS)


def test_recorded_children_need_one_layer_and_a_forward_pass() -> None:
    layers = nn.Sequential(*(make_class_layer(Quadratic()) for _ in range(2)))
    for module, found in ((layers, "2"), (nn.Linear(2, 2), "0")):
        with pytest.raises(ValueError, match=found), Quadratic.record_children(module):
            pass
    with Quadratic.record_children(make_class_layer(Quadratic())) as children:
        pass
    with pytest.raises(RuntimeError, match="forward pass"):
        children.ascend(LABELS)


def test_trap_48_ascent_changes_coefficients_only_and_descent_weights_only() -> None:
    layer, pose = make_class_layer(Quadratic()), make_batch()
    weight, b = layer.weight.detach().clone(), layer.coefficients["coefficient"].clone()
    Quadratic.ascend(layer, pose, LABELS)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=0)
    updated = layer.coefficients["coefficient"].clone()
    assert_different(updated, b)
    assert not updated.requires_grad
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(pose).length().sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.coefficients["coefficient"], updated, rtol=0, atol=0)
    assert_different(layer.weight, weight)
    assert "coefficients.coefficient" in layer.state_dict()


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.n_elements = max(self.n_elements, leaf.numel())
        return result


@pytest.mark.parametrize("streamed", [True, False])
def test_trap_49_no_matrix_of_children_by_children(streamed: bool) -> None:
    """With 3072 children such a matrix would be larger than votes and weights."""
    children, images = 3072, 2
    layer = DenseCapsules(children, 8, 10, 16, routing=Quadratic(lr=1e-6), streamed=streamed)
    pose, labels = torch.randn(images, children, 8), torch.arange(images)
    with LargestTensor() as largest:
        Quadratic.ascend(layer, pose, labels)
    limit = max(images * children * 10 * 16, layer.weight.numel())
    assert children < largest.n_elements <= limit < children**2
    with LargestTensor() as largest:  # the mode detects such a matrix
        one_class = layer.votes(pose[:1]).dense()[0, :, 0]
        one_class @ one_class.T
    assert largest.n_elements == children**2


def test_trap_50_l1_penalty_has_no_gradient_at_zero() -> None:
    layer = make_small_layer(Quadratic("l1", lr=0.1, penalty_weight=0.5), [[0.0, 1.0], [0.5, -2.0]])
    Quadratic.ascend(layer, torch.ones(1, 2, 1).double(), torch.tensor([0]))
    v0, v1 = 3 * 0.5, 2 * 1 + 2
    expected = [
        [0 + 0.2 * (1 * v0), 1 + 0.2 * (-2 * v1 - 0.5)],
        [0.5 + 0.2 * (3 * v0 - 0.5), -2 + 0.2 * (1 * v1 + 0.5)],
    ]
    assert largest_difference(layer.coefficients["coefficient"], expected) < EXACT


@pytest.mark.parametrize("penalty", ["l2", "l1"])
@pytest.mark.parametrize("objective", ["sum", "capsule"])
def test_adam_steps_equal_reference(penalty: Any, objective: Any) -> None:
    """Adam in plain Python, with the gradient of the mean objective by autograd."""
    layer, pose = make_class_layer(Quadratic(penalty, "adam", objective=objective, penalty_weight=0.2)), make_batch()
    votes = layer.votes(pose).dense().detach()
    signs = torch.tensor(SIGNS, dtype=torch.float64)

    def gradient(b: list) -> list:
        x = torch.tensor(b, dtype=torch.float64, requires_grad=True)
        v = (x[..., None] * votes).sum(1)
        v = v if objective == "sum" else squash(v)
        penalised = (x**2 if penalty == "l2" else x.abs()).mean(0).sum()
        value = (signs * v.square().sum(-1)).sum(-1).mean() - 0.2 * penalised
        return torch.autograd.grad(value, x)[0].tolist()

    expected = reference.adam_steps(gradient, layer.coefficients["coefficient"].tolist(), 0.0002, 3)
    for _ in range(3):
        Quadratic.ascend(layer, pose, LABELS)
    assert largest_difference(layer.coefficients["coefficient"], expected) < REFERENCE


def test_several_labels_per_image() -> None:
    hot = torch.tensor([[1, 1, 0]] * 6)
    one, two = make_class_layer(Quadratic()), make_class_layer(Quadratic())
    Quadratic.ascend(one, make_batch(), hot)
    Quadratic.ascend(two, make_batch(), hot.bool())
    torch.testing.assert_close(one.coefficients["coefficient"], two.coefficients["coefficient"], rtol=0, atol=0)
    value = Quadratic.ascend(make_class_layer(Quadratic()), make_batch(), hot)
    total = one.votes(make_batch()).sum(make_class_layer(Quadratic()).coefficients["coefficient"]).square().sum(-1)
    expected = (total[:, 0] + total[:, 1] - total[:, 2]).mean().detach()
    assert float(value) == pytest.approx(float(expected), abs=REFERENCE)


@pytest.mark.parametrize("streamed", [True, False])
def test_gradient_of_hidden_layers_equals_finite_differences(streamed: bool) -> None:
    """Through a squash, a convolution and a stack."""
    torch.manual_seed(0)
    routing = Quadratic(lr=1.0, penalty_weight=0.0, limit=math.inf)
    hidden = ConvCapsules(2, 4, 3, 4, 2, routing=routing, init=0.4, streamed=streamed)
    top = DenseCapsules(12, 4, 3, 4, routing=routing, init=0.4, streamed=streamed)
    model = CapsuleStack([hidden, top]).double()
    pose = torch.randn(6, 3, 3, 2, 4, dtype=torch.float64)
    signs = torch.tensor(SIGNS, dtype=torch.float64)
    b = hidden.coefficients["coefficient"].clone()

    def objective(b: torch.Tensor) -> float:
        hidden.coefficients["coefficient"].copy_(b)
        total = top.votes(hidden(pose)).sum(top.coefficients["coefficient"])
        return float((signs * total.square().sum(-1)).sum(-1).mean().detach())

    expected = torch.zeros_like(b)
    for i, j in [(0, 0), (5, 2), (7, 1)]:
        step = torch.zeros_like(b)
        step[i, j] = 1e-5
        expected[i, j] = (objective(b + step) - objective(b - step)) / 2e-5
    hidden.coefficients["coefficient"].copy_(b)
    Quadratic.ascend(model, pose, LABELS)
    step = hidden.coefficients["coefficient"] - b
    for i, j in [(0, 0), (5, 2), (7, 1)]:
        assert float(step[i, j]) == pytest.approx(float(expected[i, j]), abs=1e-6, rel=1e-6)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    assert not hidden.coefficients["coefficient"].requires_grad


def test_diverging_step_raises_and_changes_nothing() -> None:
    layer = make_class_layer(Quadratic(lr=1e6))
    before = layer.coefficients["coefficient"].clone()
    with pytest.raises(RoutingDivergence, match=r"limit=100\b.*\blr\b"):
        Quadratic.ascend(layer, make_batch(), LABELS)
    torch.testing.assert_close(layer.coefficients["coefficient"], before, rtol=0, atol=0)
    layer.coefficients["coefficient"].fill_(float("nan"))
    with pytest.raises(RoutingDivergence):
        Quadratic.ascend(layer, make_batch(), LABELS)


def test_ascent_changes_no_other_state_of_a_model() -> None:
    class Model(nn.Module):
        """A batch norm with running statistics, and two Quadratic layers declared in another order than called."""

        def __init__(self) -> None:
            super().__init__()
            self.top = DenseCapsules(12, 4, 3, 4, routing=Quadratic(lr=1e-3), init=0.4)
            self.hidden = ConvCapsules(2, 4, 3, 4, 2, routing=Quadratic(lr=1e-3), init=0.4)
            self.norm = nn.BatchNorm2d(1)
            self.primary = PrimaryCapsules(1, 2, 4, 2)

        def forward(self, images: torch.Tensor) -> Capsules:
            return self.top(self.hidden(self.primary(self.norm(images))))

    torch.manual_seed(0)
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Quadratic.ascend(model, torch.rand(6, 1, 4, 4), LABELS)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"top.coefficients.coefficient", "hidden.coefficients.coefficient"}
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    assert [name for name, buffer in model.named_buffers() if buffer.requires_grad] == []


def test_wrapped_models_and_keyword_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make_class_layer(Quadratic())

        def forward(self, x: torch.Tensor) -> Capsules:
            return self.layer(capsules=x)

    expected = make_class_layer(Quadratic())
    Quadratic.ascend(expected, make_batch(), LABELS)
    for wrap in (lambda model: model, nn.DataParallel):
        model = Model()
        Quadratic.ascend(wrap(model), make_batch(), LABELS)
        actual = model.layer.coefficients["coefficient"]
        torch.testing.assert_close(actual, expected.coefficients["coefficient"], rtol=0, atol=0)


def test_diverging_hidden_layer_leaves_all_layers_unchanged() -> None:
    torch.manual_seed(0)
    hidden = DenseCapsules(5, 4, 4, 4, routing=Quadratic(lr=1e9), init=0.5)
    top = DenseCapsules(4, 4, 3, 4, routing=Quadratic(lr=1e-3), init=0.5)
    model = nn.Sequential(hidden, top)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RoutingDivergence):
        Quadratic.ascend(model, torch.randn(6, 5, 4), LABELS)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_returned_objective_and_reported_coefficient() -> None:
    layer, pose = make_class_layer(Quadratic(objective="capsule", reduction="sum")), make_batch()
    lengths = layer(pose).length()
    value = Quadratic.ascend(layer, pose, LABELS)
    expected = (torch.tensor(SIGNS) * lengths**2).sum().detach()
    assert float(value) == pytest.approx(float(expected), abs=REFERENCE)
    diverging = make_class_layer(Quadratic(lr=1e6))
    b, votes = diverging.coefficients["coefficient"], diverging.votes(pose).dense()
    total = torch.einsum("ij,kijd->kjd", b, votes)
    gradient = 2 * torch.einsum("kj,kijd,kjd->ij", torch.tensor(SIGNS).double(), votes, total) / 6
    largest = float((b + 2e6 * (gradient / 2 - 0.001 * b)).abs().max().detach())
    with pytest.raises(RoutingDivergence) as raised:
        Quadratic.ascend(diverging, pose, LABELS)
    assert f"{largest:.3g}" in str(raised.value)


def test_adam_ignores_the_reduction() -> None:
    moments = []
    for reduction in ("mean", "sum"):
        layer = make_class_layer(Quadratic(method="adam", reduction=reduction, penalty_weight=0.2))
        Quadratic.ascend(layer, make_batch(), LABELS)
        Quadratic.ascend(layer, make_batch(), LABELS)
        moments.append(layer.coefficients["second_moment"])
    torch.testing.assert_close(*moments, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_accumulates_small_steps_in_half_precision(dtype: torch.dtype) -> None:
    layer = make_class_layer(Quadratic(method="adam", lr=0.05)).to(dtype)
    before = layer.coefficients["coefficient"].clone()
    for _ in range(300):
        Quadratic.ascend(layer, make_batch().to(dtype), LABELS)
    assert int(layer.coefficients["n_steps"]) == 300
    assert float((layer.coefficients["coefficient"] - before).abs().mean()) > 0.5
