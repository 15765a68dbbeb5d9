"""Hahn 2019: self-routing, after the authors' code."""

from .arithmetic import dot, softmax, weighted_sum
from .sites import Parents

TINY = 1e-10  # lower bound of divisors


def route(sites, p):
    return [_route(site, p) for site in sites]


def _route(site, p):
    slots, parents = range(len(site.votes)), range(len(site.votes[0]))
    coupling = [
        softmax([dot(p["classifier"][i][j], site.slots[i]) + p["offset"][i][j] for j in parents]) for i in slots
    ]
    weight = [[site.activation[i] * coupling[i][j] for j in parents] for i in slots]
    mass = [sum(weight[i][j] for i in slots) for j in parents]
    activation = [mass[j] / max(sum(site.activation), TINY) for j in parents]
    total = weighted_sum(site, weight)
    return Parents([[x / max(mass[j], TINY) for x in total[j]] for j in parents], activation, coupling)
