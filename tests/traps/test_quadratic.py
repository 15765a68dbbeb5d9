"""What is easy to get wrong about Yang 2021, and the other half of its training."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.reference import quadratic as loops
from tests.tolerances import EXACT, REFERENCE, largest_difference
from torchcaps import Capsules, route
from torchcaps.nn import CapsuleStack, ConvCapsules, DenseCapsules, PrimaryCapsules, squash
from torchcaps.routing import Quadratic, RoutingDivergence


def class_layer(routing: Quadratic, children: int = 5, parents: int = 3, **options: Any) -> DenseCapsules:
    torch.manual_seed(0)
    layer = DenseCapsules(children, 4, parents, 4, routing=routing, init=0.5, **options).double()
    layer.coefficients["coefficient"].copy_(torch.randn(children, parents).double())
    return layer


def batch(children: int = 5, images: int = 6) -> torch.Tensor:
    return torch.randn(images, children, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


ROOT = Path(__file__).resolve().parent.parent.parent
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
SIGNS = [[1.0 if j == label else -1.0 for j in range(3)] for label in LABELS.tolist()]


def test_trap_46_coefficients_are_global_and_not_zero() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Quadratic())
    assert layer.coefficients["coefficient"].shape == (1152, 10)
    assert torch.all(layer.coefficients["coefficient"] == 1)
    assert float(layer(torch.randn(2, 1152, 8)).length().detach().min()) > 0  # and inference needs no label
    with pytest.raises(ValueError, match="initial must not be 0"):
        Quadratic(initial=0.0)
    votes = torch.randn(2, 6, 3, 4)
    negative = torch.randn(6, 3)
    found = route(votes, Quadratic(), coefficients={"coefficient": negative}).pose
    assert torch.allclose(found, squash((negative[..., None] * votes).sum(1)), atol=1e-6)


def by_hand(routing: Quadratic, coefficients: list) -> DenseCapsules:
    """Two children, two classes, poses of one number, and matrices that make the votes (1, 2) and (3, -1)."""
    layer = DenseCapsules(2, 1, 2, 1, routing=routing).double()
    layer.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, -1.0]]).view(2, 1, 2, 1))
    layer.coefficients["coefficient"].copy_(torch.tensor(coefficients))
    return layer


def test_trap_47_labels_push_up_and_all_others_down_by_hand() -> None:
    """One image of class 0: v = (b00 + 3 b10, 2 b01 - b11), F = v0² - v1²."""
    layer = by_hand(Quadratic(lr=0.1, penalty_weight=0.5), [[1.0, 1.0], [0.5, -2.0]])
    value = Quadratic.ascend(layer, torch.ones(1, 2, 1).double(), torch.tensor([0]))
    v0, v1 = 1 + 3 * 0.5, 2 * 1 + 2
    assert abs(float(value) - (v0**2 - v1**2)) < EXACT
    expected = [
        [1 + 0.2 * (1 * v0 - 0.5 * 1), 1 + 0.2 * (-2 * v1 - 0.5 * 1)],
        [0.5 + 0.2 * (3 * v0 - 0.5 * 0.5), -2 + 0.2 * (1 * v1 + 0.5 * 2)],
    ]
    assert largest_difference(layer.coefficients["coefficient"], expected) < EXACT


@pytest.mark.parametrize("penalty", ["l2", "l1"])
def test_trap_47_the_step_is_that_of_the_paper_and_climbs(penalty: Any) -> None:
    layer = class_layer(Quadratic(penalty, lr=1e-4, penalty_weight=0.3, reduction="sum"))
    pose = batch()
    votes = layer.votes(pose).dense().tolist()
    b = layer.coefficients["coefficient"].tolist()
    Quadratic.ascend(layer, pose, LABELS)
    moved = layer.coefficients["coefficient"].tolist()
    exact = loops.paper_step(votes, b, SIGNS, 1e-4, 0.3, penalty)
    assert largest_difference(layer.coefficients["coefficient"], exact) < REFERENCE
    before, after = (loops.objective_value(votes, x, SIGNS, 0.3, penalty) for x in (b, moved))
    assert after > before


def test_trap_48_each_half_of_training_leaves_the_other_alone() -> None:
    layer, pose = class_layer(Quadratic()), batch()
    weight, b = layer.weight.detach().clone(), layer.coefficients["coefficient"].clone()
    Quadratic.ascend(layer, pose, LABELS)
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, weight)
    moved = layer.coefficients["coefficient"].clone()
    assert not torch.equal(moved, b)
    assert not moved.requires_grad
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    layer(pose).length().sum().backward()
    optimiser.step()
    assert torch.equal(layer.coefficients["coefficient"], moved)
    assert not torch.equal(layer.weight, weight)
    assert "coefficients.coefficient" in layer.state_dict()


SCRIPT = """
import sys, torch
from torchcaps.bench.memory import resident_peak
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Quadratic
layer = DenseCapsules(9216, 8, 10, 16, routing=Quadratic(lr=1e-6), streamed=True)
pose, labels = torch.randn(4, 9216, 8), torch.arange(4)
Quadratic.ascend(layer, pose[:1], labels[:1])
before = resident_peak()
if sys.argv[1] == "ascend":
    Quadratic.ascend(layer, pose, labels)
else:
    votes = layer.votes(pose[:1]).dense()[0, :, 0]
    votes @ votes.T
print(resident_peak() - before)
"""


@pytest.mark.parametrize(("what", "small"), [("ascend", True), ("matrix", False)])
def test_trap_49_no_matrix_of_children_by_children(what: str, small: bool) -> None:
    """9216 children: such a matrix takes 324 MiB (and is seen where it is made), the votes 23, the coefficients 0.4."""
    run = subprocess.run([sys.executable, "-c", SCRIPT, what], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (int(run.stdout) / 2**20 < 60) == small


def test_trap_50_the_l1_step_leaves_zeros_to_the_quadratic_term() -> None:
    layer = by_hand(Quadratic("l1", lr=0.1, penalty_weight=0.5), [[0.0, 1.0], [0.5, -2.0]])
    Quadratic.ascend(layer, torch.ones(1, 2, 1).double(), torch.tensor([0]))
    v0, v1 = 3 * 0.5, 2 * 1 + 2
    expected = [
        [0 + 0.2 * (1 * v0), 1 + 0.2 * (-2 * v1 - 0.5)],
        [0.5 + 0.2 * (3 * v0 - 0.5), -2 + 0.2 * (1 * v1 + 0.5)],
    ]
    assert largest_difference(layer.coefficients["coefficient"], expected) < EXACT


@pytest.mark.parametrize("penalty", ["l2", "l1"])
@pytest.mark.parametrize("objective", ["sum", "capsule"])
def test_adam_climbs_as_the_authors_code_does(penalty: Any, objective: Any) -> None:
    """Adam's steps against its definition, with the slope of the mean objective by autograd."""
    layer, pose = class_layer(Quadratic(penalty, "adam", objective=objective, penalty_weight=0.2)), batch()
    votes = layer.votes(pose).dense().detach()
    signs = torch.tensor(SIGNS, dtype=torch.float64)

    def slope(b: list) -> list:
        x = torch.tensor(b, dtype=torch.float64, requires_grad=True)
        v = (x[..., None] * votes).sum(1)
        v = v if objective == "sum" else squash(v)
        penalised = (x**2 if penalty == "l2" else x.abs()).mean(0).sum()
        value = (signs * v.square().sum(-1)).sum(-1).mean() - 0.2 * penalised
        return torch.autograd.grad(value, x)[0].tolist()

    expected = loops.adam_steps(slope, layer.coefficients["coefficient"].tolist(), 0.0002, 3)
    for _ in range(3):
        Quadratic.ascend(layer, pose, LABELS)
    assert largest_difference(layer.coefficients["coefficient"], expected) < REFERENCE


def test_several_labels_an_image_all_push_up() -> None:
    hot = torch.tensor([[1, 1, 0]] * 6)
    one, two = class_layer(Quadratic()), class_layer(Quadratic())
    Quadratic.ascend(one, batch(), hot)
    Quadratic.ascend(two, batch(), hot.bool())
    assert torch.equal(one.coefficients["coefficient"], two.coefficients["coefficient"])
    value = Quadratic.ascend(class_layer(Quadratic()), batch(), hot)
    total = one.votes(batch()).sum(class_layer(Quadratic()).coefficients["coefficient"]).square().sum(-1)
    assert abs(float(value - (total[:, 0] + total[:, 1] - total[:, 2]).mean().detach())) < REFERENCE


@pytest.mark.parametrize("streamed", [True, False])
def test_hidden_layers_follow_the_chain_rule(streamed: bool) -> None:
    """The step of a hidden layer against differences of F, through a squash, a convolution and a schedule."""
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
    moved = hidden.coefficients["coefficient"] - b
    for i, j in [(0, 0), (5, 2), (7, 1)]:
        assert abs(float(moved[i, j] - expected[i, j])) < 1e-6 * max(1, abs(float(expected[i, j])))
    assert all(p.grad is None for p in model.parameters())
    assert not hidden.coefficients["coefficient"].requires_grad


def test_a_step_that_runs_away_is_refused_whole() -> None:
    layer = class_layer(Quadratic(lr=1e6))
    before = layer.coefficients["coefficient"].clone()
    with pytest.raises(RoutingDivergence, match=r"ran away.*limit of 100.*lower rate"):
        Quadratic.ascend(layer, batch(), LABELS)
    assert torch.equal(layer.coefficients["coefficient"], before)
    layer.coefficients["coefficient"].fill_(float("nan"))
    with pytest.raises(RoutingDivergence):
        Quadratic.ascend(layer, batch(), LABELS)


def test_nothing_of_a_model_changes_but_the_coefficients() -> None:
    class Model(nn.Module):
        """A batch norm, which keeps averages, before two Quadratic layers that stand in another order than called."""

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
    assert all(p.grad is None for p in model.parameters())
    assert not any(buffer.requires_grad for buffer in model.buffers())


def test_wrapped_models_and_named_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = class_layer(Quadratic())

        def forward(self, x: torch.Tensor) -> Capsules:
            return self.layer(capsules=x)

    expected = class_layer(Quadratic())
    Quadratic.ascend(expected, batch(), LABELS)
    for wrap in (lambda model: model, nn.DataParallel):
        model = Model()
        Quadratic.ascend(wrap(model), batch(), LABELS)
        assert torch.equal(model.layer.coefficients["coefficient"], expected.coefficients["coefficient"])


def test_a_hidden_layer_that_runs_away_leaves_the_class_layer_alone_too() -> None:
    torch.manual_seed(0)
    hidden = DenseCapsules(5, 4, 4, 4, routing=Quadratic(lr=1e9), init=0.5)
    top = DenseCapsules(4, 4, 3, 4, routing=Quadratic(lr=1e-3), init=0.5)
    model = nn.Sequential(hidden, top)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RoutingDivergence, match=r"\|b\| = [0-9.e+]+, over the limit"):
        Quadratic.ascend(model, torch.randn(6, 5, 4), LABELS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_returned_objective_and_the_message_of_a_divergence() -> None:
    layer, pose = class_layer(Quadratic(objective="capsule", reduction="sum")), batch()
    lengths = layer(pose).length()
    value = Quadratic.ascend(layer, pose, LABELS)
    assert abs(float((value - (torch.tensor(SIGNS) * lengths**2).sum()).detach())) < REFERENCE
    wild = class_layer(Quadratic(lr=1e6))
    b, votes = wild.coefficients["coefficient"], wild.votes(pose).dense()
    total = torch.einsum("ij,kijd->kjd", b, votes)
    slope = 2 * torch.einsum("kj,kijd,kjd->ij", torch.tensor(SIGNS).double(), votes, total) / 6
    largest = float((b + 2e6 * (slope / 2 - 0.001 * b)).abs().max().detach())
    with pytest.raises(RoutingDivergence) as refusal:
        Quadratic.ascend(wild, pose, LABELS)
    assert f"|b| = {largest:.3g}," in str(refusal.value)


def test_adam_takes_the_mean_whatever_the_reduction() -> None:
    moved = []
    for reduction in ("mean", "sum"):
        layer = class_layer(Quadratic(method="adam", reduction=reduction, penalty_weight=0.2))
        Quadratic.ascend(layer, batch(), LABELS)
        Quadratic.ascend(layer, batch(), LABELS)
        moved.append(layer.coefficients["second_moment"])
    assert torch.equal(*moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_climbs_in_half_precision(dtype: torch.dtype) -> None:
    layer = class_layer(Quadratic(method="adam", lr=0.05)).to(dtype)
    before = layer.coefficients["coefficient"].clone()
    for _ in range(300):
        Quadratic.ascend(layer, batch().to(dtype), LABELS)
    assert int(layer.coefficients["n_steps"]) == 300
    assert float((layer.coefficients["coefficient"] - before).abs().mean()) > 0.5


def test_bad_calls_are_refused() -> None:
    layer = class_layer(Quadratic())
    with pytest.raises(ValueError, match="must have a capsule layer with Quadratic routing, got Linear"):
        Quadratic.ascend(nn.Linear(2, 2), batch(), LABELS)
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2, got 3"):
        Quadratic.ascend(layer, batch(), LABELS + 1)
    with pytest.raises(ValueError, match="one for each of the 6 images, got 5"):
        Quadratic.ascend(layer, batch(), LABELS[:5])
    with pytest.raises(TypeError, match="module must be a capsule layer or a model, got NoneType"):
        Quadratic.ascend(None, batch(), LABELS)  # type: ignore[arg-type]
    unused = nn.ModuleList([class_layer(Quadratic()), class_layer(Quadratic())])
    unused.forward = lambda pose: unused[0](pose)
    with pytest.raises(ValueError, match="must call all of its 2 Quadratic layers, got 1 called"):
        Quadratic.ascend(unused, batch(), LABELS)
    apart = nn.ModuleList([class_layer(Quadratic()), class_layer(Quadratic())])
    apart.forward = lambda pose: (apart[0](pose), apart[1](pose))
    with pytest.raises(ValueError, match="must lead to the last one called"):
        Quadratic.ascend(apart, batch(), LABELS)
    twice = nn.ModuleList([class_layer(Quadratic(), parents=5)])
    twice.forward = lambda pose: twice[0](twice[0](pose))
    with pytest.raises(ValueError, match="must call each of its Quadratic layers once"):
        Quadratic.ascend(twice, batch(), LABELS)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"can't run inside torch\.inference_mode"):
        Quadratic.ascend(layer, batch(), LABELS)
    grid = ConvCapsules(2, 4, 3, 4, 2, routing=Quadratic())
    with pytest.raises(ValueError, match="class layer must have one place"):
        Quadratic.ascend(grid, torch.randn(6, 3, 3, 2, 4), LABELS)
