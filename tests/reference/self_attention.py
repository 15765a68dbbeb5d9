"""Mazzia 2021 (Efficient-CapsNet): self-attention routing, by the full Gram matrix."""

import math

from .arithmetic import dot, exp_squash, softmax, weighted_sum
from .sites import Parents


def route(sites, p):
    return [_route(site, p) for site in sites]


def _route(site, p):
    slots, parents, size = range(len(site.votes)), range(len(site.votes[0])), len(site.votes[0][0])
    coupling = []
    for i in slots:
        gram = [[dot(site.votes[i][j], site.votes[k][j]) for k in slots] for j in parents]
        c = softmax([sum(gram[j]) / math.sqrt(size) for j in parents])
        coupling.append([c[j] + p["prior"][i][j] for j in parents])
    return Parents([exp_squash(s) for s in weighted_sum(site, coupling)], None, coupling)
