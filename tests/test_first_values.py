"""First values and default settings: those of the papers or of their code."""

import pytest
import torch
from torch import Tensor

from torchcaps.nn import CapsuleActivation, ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Quadratic, Trainable, Uniform


def bound(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def spread(tensor: Tensor) -> float:
    return float(tensor.detach().std())


@pytest.mark.parametrize("routing", [Uniform(), Dynamic(), Quadratic()], ids=lambda r: r.name())
def test_dynamic_and_its_kin_start_at_a_tenth(routing: Dynamic) -> None:
    assert spread(DenseCapsules(1152, 8, 10, 16, routing=routing).weight) == pytest.approx(0.1, rel=0.01)


def test_inverted_attention_starts_as_its_authors_code() -> None:
    """sqrt(N_out / (sqrt(d) N_in k k)) for matrices, sqrt(N_out / (d N_in k k)) for vectors."""
    matrix = ConvCapsules(32, 16, 24, 16, 3, routing=InvertedAttention(), pose="matrix")
    assert spread(matrix.weight) == pytest.approx((24 / (4 * 32 * 9)) ** 0.5, rel=0.02)
    vector = ConvCapsules(16, 64, 8, 64, 3, routing=InvertedAttention())
    assert spread(vector.weight) == pytest.approx((8 / (64 * 16 * 9)) ** 0.5, rel=0.02)
    norm = {name: float(tensor.detach().mean()) for name, tensor in matrix.coefficients.named().items()}
    assert norm == {"gamma": 1.0, "beta": 0.0}


def test_em_keeps_the_size_of_poses() -> None:
    layer = ConvCapsules(32, 16, 32, 16, 3, routing=EM(), pose="matrix")
    assert spread(layer.weight) == pytest.approx(0.5, rel=0.02)
    assert all(bound(tensor) == 0 for tensor in layer.coefficients.named().values())


def test_attention_starts_as_keras_does() -> None:
    """Glorot uniform; for the transform with the fans of one kernel [3, 3, 16, 8 * 8 * 32]."""
    layer = ConvCapsules(8, 16, 8, 32, 3, routing=Attention())
    assert bound(layer.weight) == pytest.approx((6 / (9 * 16 + 9 * 8 * 8 * 32)) ** 0.5, rel=0.001)
    assert bound(layer.coefficients["attention"]) == pytest.approx((6 / (2 * 32 * 8)) ** 0.5, rel=0.01)
    assert bound(layer.coefficients["matrix"]) == pytest.approx((6 / 64) ** 0.5, rel=0.01)
    assert bound(layer.bias) == bound(layer.coefficients["offset"]) == 0
    assert bound(CapsuleActivation(8, 32).matrix) == pytest.approx((6 / 64) ** 0.5, rel=0.01)


def test_defaults_are_the_papers() -> None:
    assert Dynamic() == Dynamic(iterations=3, gradient="full", leak=False, prior=False, bias=False)
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


def test_the_ascents_own_rates() -> None:
    """Rate and strength left out: 0.01 and 0.001 for the paper's step, 0.0002 and 0.00001 for Adam."""
    settings = {"paper": (0.01, 0.001), "adam": (0.0002, 0.00001)}
    pose, labels = torch.randn(4, 5, 4).double(), torch.tensor([0, 1, 2, 0])
    for method, (rate, strength) in settings.items():
        moved = []
        for routing in (Quadratic(method=method), Quadratic(method=method, lr=rate, penalty_weight=strength)):
            torch.manual_seed(0)
            layer = DenseCapsules(5, 4, 3, 4, routing=routing).double()
            Quadratic.ascend(layer, pose, labels)
            moved.append(layer.coefficients["coefficient"])
        assert torch.equal(*moved)
        assert bound(moved[0] - 1) > 0
