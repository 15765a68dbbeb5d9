"""Heinsen routing: masks, missing children and credit."""

import pytest
import torch

from tests.contract.reference import run_reference, stack_field, to_lists
from tests.tolerances import REFERENCE, SAME, largest_difference, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Heinsen, chain_credit


def masked_layer(mask: list[list[float]]) -> DenseCapsules:
    torch.manual_seed(0)
    layer = DenseCapsules(3, 4, 2, 4, routing=Heinsen(3, mask=True)).double()
    layer.coefficients["mask"].copy_(torch.tensor(mask))
    return layer


def test_masked_parents_get_no_credit() -> None:
    layer = masked_layer([[1, 0], [0, 1], [1, 1]])
    pose = torch.randn(2, 3, 4, dtype=torch.float64)
    parents, trace = layer(pose, trace=True)
    reference = run_reference(layer, to_lists(layer, Capsules(pose)))
    assert largest_difference(parents.pose, stack_field(reference, "pose", parents.pose)) < REFERENCE
    for credit in trace.couplings:
        assert credit is not None
        credit = credit.detach()
        assert float(credit[:, [0, 1], [1, 0]].abs().max()) == 0
        assert float(credit[:, [0, 1, 2], [0, 1, 0]].abs().min()) > 0
    parents.pose.square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)


def test_mask_must_leave_each_child_a_parent() -> None:
    with pytest.raises(ValueError, match="child 1"):
        masked_layer([[1, 0], [0, 0], [1, 1]])(torch.randn(2, 3, 4))


def test_child_without_activation_is_missing() -> None:
    layer = DenseCapsules(5, 4, 2, 4, routing=Heinsen(), shared=True).double()
    pose, activation = torch.randn(2, 5, 4, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    activation[:, 3:] = 0
    _, trace = layer(Capsules(pose, activation), trace=True)
    assert float(trace.couplings[-1].detach()[:, 3:].abs().max()) == 0  # type: ignore[union-attr]


def test_credit_of_layers_is_the_product_of_their_credits() -> None:
    first, second = (DenseCapsules(*sizes, routing="heinsen").double() for sizes in [(4, 3, 3, 2), (3, 2, 2, 2)])
    capsules, lower = first(torch.randn(2, 4, 3, dtype=torch.float64), trace=True)
    _, upper = second(capsules, trace=True)
    expected = torch.einsum("bij,bjk->bik", lower.couplings[-1], upper.couplings[-1])
    assert relative_rms(chain_credit(lower, upper), expected) < SAME[torch.float64]
    with pytest.raises(ValueError, match="trace=True"):
        chain_credit()
