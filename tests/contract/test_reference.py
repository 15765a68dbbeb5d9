"""Every layer equals the loops of tests/reference: values, couplings, gradients."""

import pytest
import torch

from tests.contract.cases import CASES, DEFAULTS, PAIR_CASES, Case, differentiable, over
from tests.contract.reference import constant_agreements, reference_module, run_reference, stack_field, to_lists
from tests.tolerances import DIRECTION, REFERENCE, largest_difference
from torchcaps.capsules import Capsules

STEP = 1e-4
MAXMIN_STEP = 1e-5  # couplings have a kink wherever the largest or smallest logit of a child changes
STREAMED = {"stored": False, "streamed": True}


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_routing_has_reference_loops(name: str) -> None:
    """A routing of the library needs tests/reference/<registered name>.py, the paper's loops in plain Python."""
    assert callable(reference_module(name).route)


@over(CASES + PAIR_CASES, n=250, streamed=STREAMED)
def test_values_equal_reference(case: Case, streamed: bool) -> None:
    layer, children = case.layer(streamed), case.children()
    parents, trace = layer(children, trace=True)
    reference = run_reference(layer, to_lists(layer, children))
    assert largest_difference(parents.pose, stack_field(reference, "pose", parents.pose)) < REFERENCE
    coupling = trace.couplings[-1]
    assert largest_difference(coupling, stack_field(reference, "coupling", coupling)) < REFERENCE
    has_activation = reference[0][0].activation is not None
    assert (parents.activation is not None) == has_activation
    if has_activation:
        expected = stack_field(reference, "activation", parents.activation)
        assert largest_difference(parents.activation, expected) < REFERENCE


@over(CASES, n=80, streamed=STREAMED)
def test_gradients_equal_finite_differences_of_reference(case: Case, streamed: bool) -> None:
    """Directional derivatives of a random functional of the parents, in children and all parameters at once."""
    layer, children = case.layer(streamed), case.children(batch=1)
    leaves = Capsules(*(tensor.requires_grad_() for tensor in children))
    named = differentiable(layer, leaves)
    generator = torch.Generator().manual_seed(7)

    def functional(pose: torch.Tensor, activation: torch.Tensor | None) -> torch.Tensor:
        total = (pose * pose_weight).sum()
        return total if activation is None else total + (activation * activation_weight).sum()

    parents = layer(leaves)
    pose_weight = torch.randn(parents.pose.shape, generator=generator, dtype=torch.float64)
    activation_weight = torch.randn(parents.pose.shape[:-1], generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(functional(*parents), list(named.values()), allow_unused=True)
    agreements = constant_agreements(layer, to_lists(layer, children))
    start = {name: tensor.detach().clone() for name, tensor in named.items()}
    step = MAXMIN_STEP if getattr(layer.routing, "normalize", None) == "maxmin" else STEP
    for _ in range(2):
        direction = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64) for n, x in start.items()}
        expected = sum(
            (gradient * direction[name]).sum()
            for name, gradient in zip(named, gradients, strict=True)
            if gradient is not None
        )
        difference = torch.zeros((), dtype=torch.float64)
        # Central difference of fourth order (four points): routing has large higher derivatives.
        for h, weight in {step: 8, -step: -8, 2 * step: -1, -2 * step: 1}.items():
            with torch.no_grad():
                for name, tensor in named.items():
                    tensor.copy_(start[name] + h * direction[name])
            reference = run_reference(layer, to_lists(layer, leaves), agreements)
            pose = stack_field(reference, "pose", parents.pose)
            activation = None
            if parents.activation is not None:
                activation = stack_field(reference, "activation", parents.activation)
            difference += weight * functional(pose, activation) / (12 * step)
        assert abs(float(difference - expected)) <= DIRECTION * max(1.0, abs(float(expected)))
