"""Stacks of layers; their schedules are tested in tests/traps/test_inverted_attention.py."""

import itertools

import pytest
import torch

from torchcaps.nn import CapsuleStack, DenseCapsules
from torchcaps.routing import InvertedAttention


def test_trace_does_not_change_the_result() -> None:
    """Without a trace, steps that only a trace would contain are skipped."""
    sizes = [(6, 5), (5, 4), (4, 3)]
    stack = CapsuleStack([DenseCapsules(a, 4, b, 4, routing=InvertedAttention(4)) for a, b in sizes]).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    parents, traces = stack(pose, trace=True)
    torch.testing.assert_close(stack(pose).pose, parents.pose, rtol=0, atol=0)
    assert [len(trace.states) for trace in traces] == [4, 4, 4]


def test_repr_contains_the_schedule() -> None:
    stack = CapsuleStack([DenseCapsules(6, 4, 3, 4, routing="dynamic")])
    assert "schedule='concurrent'" in repr(stack)


def test_layers_may_be_named() -> None:
    layers = {"low": DenseCapsules(6, 4, 5, 4, routing="dynamic"), "top": DenseCapsules(5, 4, 3, 4, routing="dynamic")}
    named, listed = CapsuleStack(layers), CapsuleStack(layers.values())
    assert {name.split(".")[1] for name in named.state_dict()} == {"low", "top"}
    pose = torch.randn(2, 6, 4)
    torch.testing.assert_close(named(pose).pose, listed(pose).pose, rtol=0, atol=0)


def test_number_of_steps_is_linear_in_the_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps of lower layers can't reach the result; with more iterations than layers each adds all layers."""
    counts = [0]
    step = InvertedAttention.step

    def count_step(*arguments: object) -> object:
        counts[-1] += 1
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(InvertedAttention, "step", count_step)
    sizes = [(6, 5), (5, 4), (4, 3)]
    for iterations in range(1, 8):
        routing = InvertedAttention(iterations)
        CapsuleStack([DenseCapsules(a, 4, b, 4, routing=routing) for a, b in sizes])(torch.randn(2, 6, 4))
        counts.append(0)
    added = [after - before for before, after in itertools.pairwise(counts[:-1])]
    assert (counts[0], added) == (3, [1, 2, 3, 3, 3, 3])
