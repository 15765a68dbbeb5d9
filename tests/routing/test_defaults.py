"""Initial weights and default fields of the routings, as in the papers or their code."""

import pytest
import torch
from torch import Tensor

from torchcaps.nn import CapsuleActivation, ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Quadratic, Routing, Trainable, Uniform


def largest(tensor: Tensor | None) -> float:
    assert tensor is not None
    return float(tensor.detach().abs().max())


def std(tensor: Tensor) -> float:
    return float(tensor.detach().std())


@pytest.mark.parametrize("routing", [Uniform(), Dynamic(), Quadratic()], ids=lambda r: r.name())
def test_default_initial_weights_have_standard_deviation_0_1(routing: Routing) -> None:
    assert std(DenseCapsules(1152, 8, 10, 16, routing=routing).weight) == pytest.approx(0.1, rel=0.01)


def test_initial_weights_of_inverted_attention() -> None:
    """sqrt(N_out / (sqrt(d) N_in k k)) for matrices, sqrt(N_out / (d N_in k k)) for vectors: the authors' code."""
    matrix = ConvCapsules(32, 16, 24, 16, 3, routing=InvertedAttention(), pose="matrix")
    assert std(matrix.weight) == pytest.approx((24 / (4 * 32 * 9)) ** 0.5, rel=0.02)
    vector = ConvCapsules(16, 64, 8, 64, 3, routing=InvertedAttention())
    assert std(vector.weight) == pytest.approx((8 / (64 * 16 * 9)) ** 0.5, rel=0.02)
    layer_norm = {name: float(tensor.detach().mean()) for name, tensor in matrix.coefficients.named().items()}
    assert layer_norm == {"gamma": 1.0, "beta": 0.0}


def test_initial_weights_of_em_keep_the_scale_of_poses() -> None:
    layer = ConvCapsules(32, 16, 32, 16, 3, routing=EM(), pose="matrix")
    assert std(layer.weight) == pytest.approx(0.5, rel=0.02)
    assert {name: largest(tensor) for name, tensor in layer.coefficients.named().items()} == {"beta_u": 0, "beta_a": 0}


def test_initial_weights_of_attention_are_glorot_uniform() -> None:
    """As in Keras; for the transform with the fans of one kernel [3, 3, 16, 8 * 8 * 32]."""
    layer = ConvCapsules(8, 16, 8, 32, 3, routing=Attention())
    assert largest(layer.weight) == pytest.approx((6 / (9 * 16 + 9 * 8 * 8 * 32)) ** 0.5, rel=0.001)
    assert largest(layer.coefficients["attention"]) == pytest.approx((6 / (2 * 32 * 8)) ** 0.5, rel=0.01)
    assert largest(layer.coefficients["matrix"]) == pytest.approx((6 / 64) ** 0.5, rel=0.01)
    assert largest(layer.bias) == largest(layer.coefficients["offset"]) == 0
    assert largest(CapsuleActivation(8, 32).matrix) == pytest.approx((6 / 64) ** 0.5, rel=0.01)


def test_default_fields() -> None:
    dynamic = Dynamic(
        iterations=3, gradient="full", leak=False, prior=False, bias=False, competition="local", normalize="softmax"
    )
    assert Dynamic() == dynamic
    assert Uniform() == Uniform(over="parents")
    em = EM(
        iterations=2,
        competition="local",
        inverse_temperature=0.01,
        annealing=0.95,
        variance_floor=1e-4,
        coordinates=False,
    )
    assert EM() == em
    inverted = InvertedAttention(iterations=2, scale=True, normalize=True, activations=False, initial="zero")
    assert InvertedAttention() == inverted
    assert Attention() == Attention(residual=False, dropout=0.5)
    assert Trainable() == Trainable(relu="before")


@pytest.mark.parametrize(("method", "lr", "penalty_weight"), [("paper", 0.01, 0.001), ("adam", 0.0002, 0.00001)])
def test_default_learning_rate_and_penalty_of_the_ascent(method: str, lr: float, penalty_weight: float) -> None:
    pose, labels = torch.randn(4, 5, 4).double(), torch.tensor([0, 1, 2, 0])
    coefficients = []
    for routing in (
        Quadratic(method=method),  # type: ignore[arg-type]
        Quadratic(method=method, lr=lr, penalty_weight=penalty_weight),  # type: ignore[arg-type]
    ):
        torch.manual_seed(0)
        layer = DenseCapsules(5, 4, 3, 4, routing=routing).double()
        Quadratic.ascend(layer, pose, labels)
        coefficients.append(layer.coefficients["coefficient"])
    torch.testing.assert_close(*coefficients, rtol=0, atol=0)
    assert largest(coefficients[0] - 1) > 0
