"""Routings reproduce golden values that were computed once by loops over the equations of their papers or code."""

import torch

from tests.routing.golden import assert_golden, wave
from torchcaps.routing import SelfAttention, route


def test_self_attention() -> None:
    children, weight, prior = wave((3, 2), 0.1), wave((2, 3, 2, 4), 0.5), wave((2, 3), 0.9, 0.2)
    votes = torch.einsum("ik,jikd->ijd", children, weight)[None]
    parents, trace = route(votes, SelfAttention(), coefficients={"prior": prior.T}, trace=True)
    logits = [[0.07546576, -0.11409361, 0.22158819], [0.01225352, -0.08525702, 0.25219055]]
    assert_golden(trace.logits[0][0].T, logits)
    softmax = [[0.5157978, 0.49279135, 0.49235001], [0.4842022, 0.50720865, 0.50764999]]
    assert_golden(trace.couplings[0][0].T - prior, softmax)
    pose = [
        [-0.22641579, -0.18514883, -0.05706583, 0.09812461],
        [0.13892074, 0.06643704, -0.03772658, -0.1236541],
    ]
    assert_golden(parents.pose[0], pose)
