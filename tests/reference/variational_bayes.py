"""Ribeiro 2020: variational Bayes routing with diagonal covariances, after the authors' code."""

import math

from .arithmetic import sigmoid, softmax
from .sites import Parents


def route(sites, p, iterations, competition, activation, coordinates):
    if coordinates:
        for site in sites:
            _add_coordinates(site)
    groups = {}
    for s, site in enumerate(sites):
        for i, child in enumerate(site.child):
            groups.setdefault(child if competition == "global" else (s, i), []).append((s, i))
    logits = [[[0.0] * len(vote) for vote in site.votes] for site in sites]
    for _ in range(iterations):
        r = [[[0.0] * len(row) for row in rows] for rows in logits]
        for members in groups.values():
            coefficients = iter(softmax([x for s, i in members for x in logits[s][i]]))
            for s, i in members:
                r[s][i] = [next(coefficients) for _ in logits[s][i]]
        fits = [_update(site, r[s], p) for s, site in enumerate(sites)]
        logits = [fit[2] for fit in fits]
    return [
        Parents(m, [sigmoid(a) if activation == "sigmoid" else a for a in act], r[s])
        for s, (m, act, _) in enumerate(fits)
    ]


def _update(site, r, p):
    """Return means, activation logits and the logits of the next responsibilities."""
    slots, parents, size = range(len(site.votes)), range(len(site.votes[0])), len(site.votes[0][0])
    rho = [[r[i][j] * site.activation[i] for j in parents] for i in slots]
    R = [sum(rho[i][j] for i in slots) for j in parents]
    means, activations, columns = [], [], []
    for j in parents:
        mu = [sum(rho[i][j] * site.votes[i][j][d] for i in slots) / max(R[j], 1e-10) for d in range(size)]
        kappa, nu = 1 + R[j], size + 1 + R[j]
        m = [R[j] * x / kappa for x in mu]
        psi = [
            1 + sum(rho[i][j] * (site.votes[i][j][d] - mu[d]) ** 2 for i in slots) + R[j] / kappa * mu[d] ** 2
            for d in range(size)
        ]
        ln_pi = _digamma(1 + R[j]) - _digamma(sum(1 + R[k] for k in parents))
        ln_det = sum(_digamma((nu - d) / 2) - math.log(psi[d]) for d in range(size)) + size * math.log(2)
        entropy = 0.5 * size * math.log(2 * math.pi * math.e) - 0.5 * ln_det
        activations.append(p["beta_a"][j] - (math.exp(ln_pi) * entropy + p["beta_u"][j]))
        means.append(m)
        constant = ln_pi + 0.5 * ln_det - 0.5 * size * math.log(2 * math.pi) - 0.5 * size / kappa
        columns.append(
            [
                constant - 0.5 * nu * sum((v - a) ** 2 / b for v, a, b in zip(site.votes[i][j], m, psi, strict=True))
                for i in slots
            ]
        )
    return means, activations, [[columns[j][i] for j in parents] for i in slots]


def _digamma(x):
    """By the recurrence to large arguments and the asymptotic series."""
    result = 0.0
    while x < 10:
        result -= 1 / x
        x += 1
    y = 1 / (x * x)
    series = y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y * (1 / 132 - y * 691 / 32760)))))
    return result + math.log(x) - 0.5 / x - series


def _add_coordinates(site):
    """Add (row + 1) / 10 H and (column + 1) / 10 W to the right-hand column of the first two rows."""
    height, width = site.grid
    for vote, (row, column) in zip(site.votes, site.coordinates, strict=True):
        for matrix in vote:
            side = math.isqrt(len(matrix))
            matrix[side - 1] += row / 10 + 0.05 / height
            matrix[2 * side - 1] += column / 10 + 0.05 / width
