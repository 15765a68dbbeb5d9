"""Sabour 2017, Procedure 1, line by line."""

from .arithmetic import dot, softmax, squash, weighted_sum
from .sites import Parents


def route(sites, p, iterations, gradient, leak, prior, bias, frozen=None):
    """``frozen``: agreements to take as constants, one [i][j] a site (``gradient="last"``)."""
    return [
        _route(site, p, iterations, leak, prior, bias, None if frozen is None else frozen[number])
        for number, site in enumerate(sites)
    ]


def agreements(sites, p, iterations, leak, prior, bias):
    """What the logits of the last iteration have grown by, one [i][j] a site."""
    return [_agreement(site, p, iterations, leak, prior, bias) for site in sites]


def _start(site, p, prior):
    n_parents = len(site.votes[0])
    if prior:
        return [list(p["prior"][i]) for i in range(len(site.votes))]
    return [[0.0] * n_parents for _ in site.votes]


def _couple(logits, leak):
    if leak:
        return [softmax([0.0, *row])[1:] for row in logits]
    return [softmax(row) for row in logits]


def _parents(site, coupling, p, bias):
    total = weighted_sum(site, coupling)
    if bias:
        total = [[s + b for s, b in zip(total[j], p["bias"][j], strict=True)] for j in range(len(total))]
    return [squash(s) for s in total]


def _agreement(site, p, iterations, leak, prior, bias):
    start = _start(site, p, prior)
    grown = [[0.0] * len(row) for row in start]
    for _ in range(iterations - 1):
        logits = [[b + g for b, g in zip(x, y, strict=True)] for x, y in zip(start, grown, strict=True)]
        v = _parents(site, _couple(logits, leak), p, bias)
        for i in range(len(site.votes)):
            for j in range(len(v)):
                grown[i][j] += dot(site.votes[i][j], v[j])  # line 7
    return grown


def _route(site, p, iterations, leak, prior, bias, frozen):
    grown = _agreement(site, p, iterations, leak, prior, bias) if frozen is None else frozen
    start = _start(site, p, prior)
    logits = [[b + g for b, g in zip(x, y, strict=True)] for x, y in zip(start, grown, strict=True)]
    coupling = _couple(logits, leak)
    return Parents(_parents(site, coupling, p, bias), None, coupling)
