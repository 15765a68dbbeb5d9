"""Tsai 2020, Procedure 1, and its ablation C with the activations of EM routing."""

import math

from .arithmetic import dot, sigmoid, softmax, weighted_sum
from .em import m_step
from .sites import Parents


def layer_norm(x, gamma, beta):
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return [g * (v - mean) / math.sqrt(variance + 1e-5) + b for v, g, b in zip(x, gamma, beta, strict=True)]


def step(site, p, parents, t, scale, normalize, activations):
    """Run one iteration; ``parents[j][d]`` are those of the previous one."""
    size = len(site.votes[0][0])
    logits = [[dot(parents[j], vote[j]) for j in range(len(vote))] for vote in site.votes]
    if scale:
        logits = [[a / math.sqrt(size) for a in row] for row in logits]
    coupling = [softmax(row) for row in logits]
    weight, activation = coupling, None
    if activations:
        weight = [[r * a for r in row] for row, a in zip(coupling, site.activation, strict=True)]
        _, _, logits_of_activation = m_step(site, weight, p, 0.01 * (1 - 0.95 ** (t + 1)), 1e-4)
        activation = [sigmoid(x) for x in logits_of_activation]
    pose = weighted_sum(site, weight)
    if normalize:
        pose = [layer_norm(s, p["gamma"], p["beta"]) for s in pose]
    return Parents(pose, activation, coupling)


def route(sites, p, iterations, scale, normalize, activations, initial):
    result = []
    for site in sites:
        size = len(site.votes[0][0])
        parents = [[0.0] * size for _ in site.votes[0]] if initial == "zero" else p["initial"]
        for t in range(iterations):
            result_of_step = step(site, p, parents, t, scale, normalize, activations)
            parents = result_of_step.pose
        result.append(result_of_step)
    return result
