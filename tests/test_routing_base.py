"""The registry, the loop and the small things that routings share."""

import dataclasses

import pytest
import torch

from torchcaps import list_routings, route
from torchcaps.capsules import as_capsules
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
from torchcaps.votes import DenseVotes, StreamedVotes, Votes, Wiring

GEOMETRY = Geometry(slots=6, parents=3, dim=4, rows=2, columns=2, types=6, child_dim=4)


def test_the_seven_routings_are_registered() -> None:
    seven = {Uniform, Dynamic, EM, InvertedAttention, Attention, Trainable, Quadratic}
    assert {routing.name() for routing in seven} <= set(list_routings())
    assert InvertedAttention.name() == "inverted_attention"
    for cls in seven:
        assert type(create_routing(cls.name())) is cls
        assert cls.paper
        assert cls.equation


def test_a_routing_is_a_value() -> None:
    assert as_routing("dynamic") == Dynamic() == Dynamic(3)
    assert len({Dynamic(2), Dynamic(2), Dynamic(3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dynamic().iterations = 4  # type: ignore[misc]


def test_the_loop_and_its_trace() -> None:
    votes = DenseVotes(torch.randn(2, 6, 3, 4), Wiring(6))
    assert isinstance(votes, Votes)
    children = as_capsules(torch.randn(2, 6, 4))
    capsules, trace = run_routing(Dynamic(3), {}, votes, children, trace=True)
    assert isinstance(trace, Trace)
    assert torch.equal(trace.states[-1].capsules().pose, capsules.pose)
    assert len(trace.logits) == 3
    assert run_routing(Dynamic(3), {}, votes, children)[1].states == ()


def test_a_state_without_a_step_has_no_parents() -> None:
    with pytest.raises(ValueError, match="has not taken a step"):
        State().capsules()


def test_sizes_of_coefficients() -> None:
    assert GEOMETRY.size(("I", "J", "D")) == (6, 3, 4)
    assert GEOMETRY.size(("L", "J")) == (3,)
    assert dataclasses.replace(GEOMETRY, sites=(5, 4)).size(("L", "J")) == (5, 4, 3)
    tensor = torch.empty(3)
    Coefficient(("J",), 0.5).fill(tensor)
    assert torch.all(tensor == 0.5)
    Coefficient(("J",), torch.nn.init.ones_).fill(tensor)
    assert torch.all(tensor == 1)


def test_what_has_no_step_is_no_routing() -> None:
    class Stepless(Routing):
        """Something that routings may share."""

    assert "stepless" not in list_routings()
    for routing in (Stepless(), Routing()):
        with pytest.raises(TypeError, match=r"must be an algorithm, and .* defines no step"):
            route(torch.randn(1, 2, 3, 4), routing)


def test_random_first_parents_are_drawn_once() -> None:
    from torchcaps.nn import DenseCapsules

    layer = DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(initial="random"))
    pose = torch.randn(2, 6, 4)
    assert torch.equal(layer(pose).pose, layer(pose).pose)
    assert "coefficients.initial" in layer.state_dict()
    assert "coefficients.initial" not in dict(layer.named_parameters())
    learned = DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(initial="learned"))
    assert "coefficients.initial" in dict(learned.named_parameters())


def test_pieces_are_as_small_as_asked() -> None:
    weight = torch.randn(6, 4, 3, 4)
    votes = StreamedVotes(torch.randn(2, 6, 4), weight, None, 1, Wiring(6), piece=4)
    assert list(votes.wiring.pieces(4)) == [(0, 4), (4, 6)]
    assert votes.dense().shape == (2, 6, 3, 4)
    assert not votes.detach().dense().requires_grad
