"""Sabour 2017, Procedure 1, line by line."""

from .arithmetic import dot, softmax, squash, weighted_sum
from .sites import Parents


def route(sites, p, iterations, gradient, leak, prior, bias, constant_agreements=None):
    """Route; ``constant_agreements``, one [i][j] per site, replace the computed agreements (``gradient="last"``)."""
    if constant_agreements is None:
        constant_agreements = agreements(sites, p, iterations, leak, prior, bias)
    return [
        _route(site, p, leak, prior, bias, agreement)
        for site, agreement in zip(sites, constant_agreements, strict=True)
    ]


def agreements(sites, p, iterations, leak, prior, bias):
    """Return the agreements accumulated before the last iteration, one [i][j] per site."""
    return [_accumulate_agreement(site, p, iterations, leak, prior, bias) for site in sites]


def _initial_logits(site, p, prior):
    n_parents = len(site.votes[0])
    if prior:
        return [list(p["prior"][i]) for i in range(len(site.votes))]
    return [[0.0] * n_parents for _ in site.votes]


def _couplings(logits, leak):
    if leak:
        return [softmax([0.0, *row])[1:] for row in logits]
    return [softmax(row) for row in logits]


def _parents(site, coupling, p, bias):
    total = weighted_sum(site, coupling)
    if bias:
        total = [[s + b for s, b in zip(total[j], p["bias"][j], strict=True)] for j in range(len(total))]
    return [squash(s) for s in total]


def _accumulate_agreement(site, p, iterations, leak, prior, bias):
    start = _initial_logits(site, p, prior)
    agreement = [[0.0] * len(row) for row in start]
    for _ in range(iterations - 1):
        logits = [[b + a for b, a in zip(x, y, strict=True)] for x, y in zip(start, agreement, strict=True)]
        v = _parents(site, _couplings(logits, leak), p, bias)
        for i in range(len(site.votes)):
            for j in range(len(v)):
                agreement[i][j] += dot(site.votes[i][j], v[j])  # line 7
    return agreement


def _route(site, p, leak, prior, bias, agreement):
    start = _initial_logits(site, p, prior)
    logits = [[b + a for b, a in zip(x, y, strict=True)] for x, y in zip(start, agreement, strict=True)]
    coupling = _couplings(logits, leak)
    return Parents(_parents(site, coupling, p, bias), None, coupling)
