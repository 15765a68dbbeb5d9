"""Every layer equals the papers' loops: values, couplings, gradients."""

import pytest
import torch

from tests.contract.against_loops import freeze, loops_of, numbers_of, run_loops, stacked
from tests.contract.cases import CASES, DEFAULTS, PAIR_CASES, Case, differentiable, over
from tests.tolerances import DIRECTION, REFERENCE, largest_difference
from torchcaps.capsules import Capsules

STEP = 1e-4
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_routing_has_its_loops(name: str) -> None:
    """The proof of a routing: tests/reference/<its name>.py, the paper's loops in plain Python."""
    assert callable(loops_of(name).route)


@STREAMED
@over(CASES + PAIR_CASES)
def test_values_equal_the_papers_loops(case: Case, streamed: bool) -> None:
    layer, children = case.layer(streamed), case.children()
    parents, trace = layer(children, trace=True)
    found = run_loops(layer, numbers_of(layer, children))
    assert largest_difference(parents.pose, stacked(found, "pose", parents.pose)) < REFERENCE
    coupling = trace.couplings[-1]
    assert largest_difference(coupling, stacked(found, "coupling", coupling)) < REFERENCE
    has_activation = found[0][0].activation is not None
    assert (parents.activation is not None) == has_activation
    if has_activation:
        assert largest_difference(parents.activation, stacked(found, "activation", parents.activation)) < REFERENCE


@STREAMED
@over(CASES)
def test_gradients_equal_differences_of_the_papers_loops(case: Case, streamed: bool) -> None:
    """Along random directions in children and all parameters at once: d/dh of a functional of the parents."""
    layer, children = case.layer(streamed), case.children(batch=1)
    leaves = Capsules(*(tensor.requires_grad_() for tensor in children))
    named = differentiable(layer, leaves)
    generator = torch.Generator().manual_seed(7)

    def functional(pose: torch.Tensor, activation: torch.Tensor | None) -> torch.Tensor:
        total = (pose * functional_pose).sum()
        return total if activation is None else total + (activation * functional_activation).sum()

    parents = layer(leaves)
    functional_pose = torch.randn(parents.pose.shape, generator=generator, dtype=torch.float64)
    functional_activation = torch.randn(parents.pose.shape[:-1], generator=generator, dtype=torch.float64)
    slopes = torch.autograd.grad(functional(*parents), list(named.values()), allow_unused=True)
    frozen = freeze(layer, numbers_of(layer, children))
    start = {name: tensor.detach().clone() for name, tensor in named.items()}
    for _ in range(2):
        direction = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64) for n, x in start.items()}
        expected = sum(
            (slope * direction[name]).sum() for name, slope in zip(named, slopes, strict=True) if slope is not None
        )
        difference = torch.zeros((), dtype=torch.float64)
        # Four points, so that the error is of fourth order: routing bends sharply.
        for h, share in {STEP: 8, -STEP: -8, 2 * STEP: -1, -2 * STEP: 1}.items():
            with torch.no_grad():
                for name, tensor in named.items():
                    tensor.copy_(start[name] + h * direction[name])
            found = run_loops(layer, numbers_of(layer, leaves), frozen)
            pose = stacked(found, "pose", parents.pose)
            activation = None if parents.activation is None else stacked(found, "activation", parents.activation)
            difference += share * functional(pose, activation) / (12 * STEP)
        assert abs(float(difference - expected)) <= DIRECTION * max(1.0, abs(float(expected)))
