"""Dense layers whose children share one matrix per parent."""

from typing import Any

import pytest
import torch

from tests.tolerances import SAME, relative_rms
from torchcaps.nn import DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import EM, Dynamic, Heinsen, HeinsenEM, InvertedAttention, Routing, SelfRouting, Uniform

ROUTINGS = [Dynamic(2, prior=True), EM(2), InvertedAttention(2), HeinsenEM(2), SelfRouting(), Heinsen(2)]


def gradients(layer: CapsuleLayer, pose: torch.Tensor) -> list[torch.Tensor]:
    pose = pose.clone().requires_grad_()
    parents = layer(pose).pose
    direction = torch.arange(parents.numel(), dtype=parents.dtype).view(parents.shape).cos()
    return list(torch.autograd.grad(parents, [pose, layer.weight], direction))


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: r.name())
def test_shared_matrices_equal_repeated_ones(routing: Routing, streamed: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"routing": routing, "streamed": streamed, "pose": "matrix"}
    shared = DenseCapsules(6, 4, 3, 4, shared=True, **options).double()
    own = DenseCapsules(6, 4, 3, 4, **options).double()
    with torch.no_grad():
        shared.weight.normal_(0, 0.7)
        own.weight.copy_(shared.weight.expand_as(own.weight))
        if shared.bias is not None and own.bias is not None:
            shared.bias.normal_(0, 0.3)
            own.bias.copy_(shared.bias.expand_as(own.bias))
        for name, tensor in shared.coefficients.named().items():
            target = own.coefficients[name]
            tensor.normal_(0, 0.5)
            target.copy_(tensor if tensor.dim() == target.dim() else tensor.unsqueeze(0))
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    assert relative_rms(shared(pose).pose, own(pose).pose) < SAME[torch.float64]
    (shared_pose, shared_weight), (own_pose, own_weight) = gradients(shared, pose), gradients(own, pose)
    assert relative_rms(shared_pose, own_pose) < SAME[torch.float64]
    assert relative_rms(shared_weight, own_weight.sum(0, keepdim=True)) < SAME[torch.float64]


@pytest.mark.parametrize("routing", [Uniform(), HeinsenEM(), Heinsen()], ids=lambda r: r.name())
def test_number_of_children_may_vary(routing: Routing) -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=routing, shared=True)
    assert "shared=True" in repr(layer)
    for n_children in (1, 6, 9):
        assert layer(torch.randn(2, n_children, 4)).pose.shape == (2, 3, 5)


def test_number_of_children_is_fixed_if_each_has_coefficients() -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=Dynamic(prior=True), shared=True)
    with pytest.raises(ValueError, match="6 children of size 4"):
        layer(torch.randn(2, 7, 4))


def test_parents_without_poses_have_activations_only() -> None:
    with_poses = DenseCapsules(6, 4, 3, 5, routing=SelfRouting())
    without = DenseCapsules(6, 4, 3, 1, routing=SelfRouting(), poses=False)
    without.load_state_dict(with_poses.coefficients.state_dict(prefix="coefficients."))
    assert sum(p.numel() for p in without.parameters()) == 6 * 3 * (4 + 1)
    pose = torch.randn(2, 6, 4)
    torch.testing.assert_close(without(pose).activation, with_poses(pose).activation)
    without.reset_parameters()
    assert float(without(pose).pose.detach().abs().max()) == 0
    with pytest.raises(ValueError, match="routing with activations"):
        DenseCapsules(6, 4, 3, 1, routing=Dynamic(), poses=False)
