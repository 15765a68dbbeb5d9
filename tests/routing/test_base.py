"""Registry, iteration loop, trace and coefficients, shared by all routings."""

import dataclasses

import pytest
import torch

from torchcaps import list_routings, route
from torchcaps.capsules import as_capsules
from torchcaps.nn import DenseCapsules
from torchcaps.routing import (
    EM,
    Attention,
    Coefficient,
    Dynamic,
    Geometry,
    InvertedAttention,
    Quadratic,
    Routing,
    State,
    Trace,
    Trainable,
    Uniform,
    as_routing,
    create_routing,
    run_routing,
)
from torchcaps.votes import DenseVotes, Votes, Wiring

GEOMETRY = Geometry(slots=6, parents=3, dim=4, rows=2, columns=2, types=6, child_dim=4)


@pytest.mark.parametrize("cls", [Uniform, Dynamic, EM, InvertedAttention, Attention, Trainable, Quadratic])
def test_routing_is_registered_with_its_source(cls: type[Routing]) -> None:
    assert cls.name() in list_routings()
    assert type(create_routing(cls.name())) is cls
    assert cls.paper != ""
    assert cls.equation != ""


def test_name_is_the_class_name_in_snake_case() -> None:
    assert InvertedAttention.name() == "inverted_attention"
    assert EM.name() == "em"


def test_routing_is_an_immutable_value() -> None:
    assert as_routing("dynamic") == Dynamic() == Dynamic(3)
    assert len({Dynamic(2), Dynamic(2), Dynamic(3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dynamic().iterations = 4  # type: ignore[misc]


def test_trace_has_the_states_of_every_iteration() -> None:
    votes = DenseVotes(torch.randn(2, 6, 3, 4), Wiring(6))
    assert isinstance(votes, Votes)
    children = as_capsules(torch.randn(2, 6, 4))
    capsules, trace = run_routing(Dynamic(3), {}, votes, children, trace=True)
    assert isinstance(trace, Trace)
    torch.testing.assert_close(trace.states[-1].capsules().pose, capsules.pose, rtol=0, atol=0)
    assert len(trace.logits) == 3
    assert run_routing(Dynamic(3), {}, votes, children)[1].states == ()


def test_initial_state_has_no_parents() -> None:
    with pytest.raises(ValueError, match="step"):
        State().capsules()


def test_shape_of_coefficients() -> None:
    assert GEOMETRY.size(("I", "J", "D")) == (6, 3, 4)
    assert GEOMETRY.size(("L", "J")) == (3,)
    assert dataclasses.replace(GEOMETRY, sites=(5, 4)).size(("L", "J")) == (5, 4, 3)


def test_initial_value_of_coefficients() -> None:
    tensor = torch.empty(3)
    Coefficient(("J",), 0.5).fill(tensor)
    assert tensor.tolist() == [0.5] * 3
    Coefficient(("J",), torch.nn.init.ones_).fill(tensor)
    assert tensor.tolist() == [1.0] * 3


def test_class_without_step_is_not_a_routing() -> None:
    class Stepless(Routing):
        """An abstract base."""

    assert "stepless" not in list_routings()
    for routing in (Stepless(), Routing()):
        with pytest.raises(TypeError, match=rf"routing.*{type(routing).__name__}.*step"):
            route(torch.randn(1, 2, 3, 4), routing)


def test_random_initial_parents_are_a_buffer_and_learned_ones_a_parameter() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(initial="random"))
    pose = torch.randn(2, 6, 4)
    torch.testing.assert_close(layer(pose).pose, layer(pose).pose, rtol=0, atol=0)
    assert "coefficients.initial" in layer.state_dict()
    assert "coefficients.initial" not in dict(layer.named_parameters())
    learned = DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(initial="learned"))
    assert "coefficients.initial" in dict(learned.named_parameters())
