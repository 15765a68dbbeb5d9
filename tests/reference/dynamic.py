"""Sabour 2017, Procedure 1, line by line."""

from .arithmetic import dot, softmax, squash, weighted_sum
from .sites import Parents


def route(sites, p, iterations, gradient, leak, prior, bias, competition, normalize, constant_agreements=None):
    """Route; ``constant_agreements``, one [i][j] per site, replace the computed agreements (``gradient="last"``)."""
    if constant_agreements is None:
        constant_agreements = agreements(sites, p, iterations, leak, prior, bias, competition, normalize)
    couplings = _couplings(sites, _logits(sites, p, prior, constant_agreements), leak, competition, normalize)
    return [
        Parents(_parents(site, coupling, p, bias), None, coupling)
        for site, coupling in zip(sites, couplings, strict=True)
    ]


def agreements(sites, p, iterations, leak, prior, bias, competition, normalize):
    """Return the agreements accumulated before the last iteration, one [i][j] per site."""
    accumulated = [[[0.0] * len(vote) for vote in site.votes] for site in sites]
    for _ in range(iterations - 1):
        couplings = _couplings(sites, _logits(sites, p, prior, accumulated), leak, competition, normalize)
        for site, coupling, agreement in zip(sites, couplings, accumulated, strict=True):
            v = _parents(site, coupling, p, bias)
            for i in range(len(site.votes)):
                for j in range(len(v)):
                    agreement[i][j] += dot(site.votes[i][j], v[j])  # line 7
    return accumulated


def _logits(sites, p, prior, accumulated):
    """Return the logits of each site, [i][j]: the prior, or 0, plus the agreements."""
    return [
        [[(p["prior"][i][j] if prior else 0.0) + agreement[i][j] for j in range(len(agreement[i]))] for i in range(n)]
        for agreement, n in zip(accumulated, (len(site.votes) for site in sites), strict=True)
    ]


def _couplings(sites, logits, leak, competition, normalize):
    """Return the couplings of each site, [i][j]: eq. 3 over the parents of one site, or of all sites of a child."""
    groups = {}
    for s, site in enumerate(sites):
        for i, child in enumerate(site.child):
            groups.setdefault(child if competition == "global" else (s, i), []).append((s, i))
    couplings = [[[0.0] * len(row) for row in rows] for rows in logits]
    for members in groups.values():
        competitors = [x for s, i in members for x in logits[s][i]]
        function = softmax if normalize == "softmax" else _maxmin
        coefficients = iter(function([0.0, *competitors])[1:] if leak else function(competitors))
        for s, i in members:
            couplings[s][i] = [next(coefficients) for _ in logits[s][i]]
    return couplings


def _maxmin(logits):
    """Zhao 2019, with p = 0 and q = 1: max-min normalisation."""
    least, largest = min(logits), max(logits)
    return [(x - least) / (largest - least) if largest > least else 1.0 for x in logits]


def _parents(site, coupling, p, bias):
    total = weighted_sum(site, coupling)
    if bias:
        total = [[s + b for s, b in zip(total[j], p["bias"][j], strict=True)] for j in range(len(total))]
    return [squash(s) for s in total]
