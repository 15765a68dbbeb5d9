"""Routings reproduce golden values that were computed once by loops over the equations of their papers or code."""

import torch

from tests.routing.golden import assert_golden, wave
from torchcaps.nn import DenseCapsules
from torchcaps.routing import (
    Dynamic,
    Heinsen,
    HeinsenEM,
    KMeans,
    SelfAttention,
    SelfRouting,
    Uniform,
    VariationalBayes,
    route,
)


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


def test_self_routing() -> None:
    children, activation = wave((3, 2), 0.3), torch.tensor([[0.9, 0.2, 0.6]], dtype=torch.float64)
    votes = torch.einsum("ijdk,ik->ijd", wave((3, 2, 2, 2), 0.7), children)[None]
    coefficients = {"classifier": wave((3, 2, 2), 1.1), "offset": wave((3, 2), 0.4, 0.3)}
    parents, trace = route(
        votes, SelfRouting(), activation, children=children[None], coefficients=coefficients, trace=True
    )
    couplings = [[0.69096615, 0.30903385], [0.44330068, 0.55669932], [0.49302595, 0.50697405]]
    assert_golden(trace.couplings[0][0], couplings)
    assert_golden(parents.activation, [[0.59196779, 0.40803221]])
    assert_golden(parents.pose[0], [[0.65650517, 0.29913754], [-0.39030349, -0.34423668]])


def test_variational_bayes() -> None:
    votes, activation = wave((1, 4, 2, 4), 0.25), torch.tensor([[0.9, 0.3, 0.7, 0.5]], dtype=torch.float64)
    parents, trace = route(votes, VariationalBayes(activation="logit"), activation, trace=True)
    couplings = [
        [0.45261304, 0.54738696],
        [0.46390119, 0.53609881],
        [0.60058076, 0.39941924],
        [0.64250342, 0.35749658],
    ]
    assert_golden(trace.couplings[-1][0], couplings)
    pose = [
        [-0.28349178, -0.03852912, 0.22437646, 0.38169664],
        [0.27740707, 0.04719458, -0.2050895, -0.36105918],
    ]
    assert_golden(parents.pose[0], pose)
    assert_golden(parents.activation, [[-1.78327779, -1.6224002]])


def test_heinsen_em() -> None:
    scores, poses = wave((3,), 0.2, 2), wave((3, 2, 2), 0.35)
    votes = torch.einsum("icx,ijxd->ijcd", poses, wave((3, 2, 2, 2), 0.8)) + wave((3, 2, 2, 2), 1.3, 0.1)
    coefficients = {"beta_use": wave((3, 2), 0.15), "beta_ign": wave((3, 2), 0.55)}
    parents, trace = route(
        votes.flatten(-2)[None],
        HeinsenEM(activation="logit"),
        scores.sigmoid()[None],
        coefficients=coefficients,
        trace=True,
    )
    assert_golden(parents.activation, [[-0.45058055, 0.19063185]])
    pose = [
        [0.73693577, 0.49506852, 0.81601671, 1.05956406],
        [0.20934315, 0.17743903, 0.33438323, 0.44800506],
    ]
    assert_golden(parents.pose[0], pose)
    variance = [
        [0.14710834, 0.04542242, 0.29393275, 0.19874487],
        [0.23191141, 0.23050512, 0.05476275, 0.97906146],
    ]
    assert_golden(trace.states[-1].memory[0][0], variance)
    couplings = [[0.97062423, 0.02937577], [0.04125756, 0.95874244], [0.49487589, 0.50512411]]
    assert_golden(trace.couplings[-1][0], couplings)


def test_k_means() -> None:
    votes = wave((2, 3, 2), 0.45).transpose(0, 1)[None]
    parents, trace = route(votes, KMeans(), trace=True)
    couplings = [[0.89964571, 0.69594007, 0.12879136], [0.10035429, 0.30405993, 0.87120864]]
    assert_golden(trace.couplings[-1][0].T, couplings)
    assert_golden(trace.states[-1].memory[0][0], [[1.04623483, 1.11659494], [0.63112053, 0.88988879]])
    assert_golden(parents.pose[0], [[0.47911396, 0.51133475], [0.31436795, 0.44326322]])
    _, trace = route(votes, KMeans(similarity="cosine"), trace=True)
    assert_golden(trace.states[-1].memory[0][0], [[0.94606178, 1.0304583], [0.5691909, 0.89411486]])


def test_heinsen() -> None:
    children = wave((3, 2), 0.2)
    scaled = children / 3**0.5
    votes = torch.einsum("ik,jk,kd->ijd", scaled, wave((2, 2), 0.5), wave((2, 3), 0.6)) + wave((2, 3), 0.7, 0.1)
    coefficients = {
        "score_weight": wave((3, 2), 0.3),
        "score_bias": wave((3,), 0.4),
        "prediction": wave((3, 2), 0.8),
        "prediction_gain": wave((2, 2), 0.9),
        "prediction_bias": wave((2, 2), 1.0, 0.1),
        "similarity_weight": wave((3, 2), 1.1),
        "similarity_bias": wave((3, 2), 1.2, 0.1),
        "beta_use": wave((3, 2), 1.3),
        "beta_ign": wave((3, 2), 1.4),
    }
    parents, trace = route(votes[None], Heinsen(), children=children[None], coefficients=coefficients, trace=True)
    credit = [[0.04021763, -0.02727343], [0.10866876, 0.09581993], [-0.03343579, 0.05788434]]
    assert_golden(trace.couplings[-1][0], credit)
    chosen = [[0.53526472, 0.46473528], [0.60691416, 0.39308584], [0.54193398, 0.45806602]]
    assert_golden(trace.logits[-1][0].softmax(-1), chosen)
    pose = [[1.15291071, 0.12139641, -1.27430711], [-0.27088031, 1.16366599, -0.89278568]]
    assert_golden(parents.pose[0], pose)


def test_maxmin_normalisation() -> None:
    parents, trace = route(wave((1, 3, 3, 2), 0.65), Dynamic(3, normalize="maxmin"), trace=True)
    assert_golden(trace.couplings[-1][0], [[0, 1, 0.18762238], [0.69931956, 0, 1], [1, 0.97991126, 0]])
    pose = [[-0.16146825, -0.38899672], [0.02149032, -0.25615409], [0.45535996, 0.35574406]]
    assert_golden(parents.pose[0], pose)


def test_bias_of_dynamic_routing() -> None:
    parents, trace = route(wave((1, 3, 2, 2), 0.95), Dynamic(2, bias=True), trace=True)
    couplings = [[0.55039189, 0.44960811], [0.48159077, 0.51840923], [0.48417543, 0.51582457]]
    assert_golden(trace.couplings[-1][0], couplings)
    assert_golden(parents.pose[0], [[0.18838802, 0.27422749], [0.19435817, 0.11926522]])


def test_shared_transform() -> None:
    children, weight = wave((1, 3, 2), 0.15), wave((2, 2, 2), 0.85)  # [J, D, K]
    expected = {
        "children": [[0.33274643, 0.20146283], [-0.26494555, -0.29214919]],
        "parents": [[0.50374461, 0.30499445], [-0.39928336, -0.44028032]],
    }
    for over, pose in expected.items():
        layer = DenseCapsules(3, 2, 2, 2, routing=Uniform(over=over), shared=True).double()
        assert layer.weight.numel() == 8
        layer.weight.data.copy_(weight.permute(2, 0, 1)[None])
        assert_golden(layer(children).pose[0], pose)
