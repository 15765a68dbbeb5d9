"""Hinton 2018, Procedure 1, with the settings that the authors gave on OpenReview."""

import math

from .arithmetic import log_sigmoid, sigmoid
from .sites import Parents


def m_step(site, weight, p, temperature, floor):
    """Mean, variance and evidence of each parent; ``weight[i][j]`` is R_ij a_i."""
    means, variances, evidences = [], [], []
    slots = range(len(site.votes))
    for j in range(len(site.votes[0])):
        mass = sum(weight[i][j] for i in slots)
        mean, variance, cost = [], [], 0.0
        for h in range(len(site.votes[0][0])):
            mu = sum(weight[i][j] * site.votes[i][j][h] for i in slots) / max(mass, 1e-10)
            var = sum(weight[i][j] * (site.votes[i][j][h] - mu) ** 2 for i in slots) / max(mass, 1e-10) + floor
            cost += (p["beta_u"][j] + math.log(math.sqrt(var))) * mass
            mean.append(mu)
            variance.append(var)
        means.append(mean)
        variances.append(variance)
        evidences.append(temperature * (p["beta_a"][j] - cost))
    return means, variances, evidences


def route(sites, p, iterations, competition, inverse_temperature, annealing, variance_floor, coordinates):
    if coordinates:
        for site in sites:
            _add_coordinates(site)
    n_parents = len(sites[0].votes[0])
    readers = {}
    for site in sites:
        for child in site.child:
            readers[child] = readers.get(child, 0) + 1
    couplings = []
    for site in sites:
        rivals = [n_parents * (readers[child] if competition == "global" else 1) for child in site.child]
        couplings.append([[1 / n] * n_parents for n in rivals])
    for t in range(iterations):
        fits = []
        for site, coupling in zip(sites, couplings, strict=True):
            weight = [[r * a for r in row] for row, a in zip(coupling, site.activation, strict=True)]
            temperature = inverse_temperature * (1 - annealing ** (t + 1))
            fits.append(m_step(site, weight, p, temperature, variance_floor))
        if t < iterations - 1:
            couplings = _e_step(sites, fits, competition)
    return [
        Parents(mean, [sigmoid(e) for e in evidence], coupling)
        for (mean, _, evidence), coupling in zip(fits, couplings, strict=True)
    ]


def _e_step(sites, fits, competition):
    logits = []
    for site, (mean, variance, evidence) in zip(sites, fits, strict=True):
        rows = []
        for vote in site.votes:
            row = []
            for j in range(len(vote)):
                density = log_sigmoid(evidence[j])
                for v, mu, var in zip(vote[j], mean[j], variance[j], strict=True):
                    density -= (v - mu) ** 2 / (2 * var) + 0.5 * math.log(2 * math.pi * var)
                row.append(density)
            rows.append(row)
        logits.append(rows)
    # Who competes for a child: the parents of one site, or of all sites that read it.
    groups = {}
    for s, site in enumerate(sites):
        for i, child in enumerate(site.child):
            groups.setdefault(child if competition == "global" else (s, i), []).append((s, i))
    couplings = [[[0.0] * len(row) for row in rows] for rows in logits]
    for members in groups.values():
        largest = max(x for s, i in members for x in logits[s][i])
        total = sum(math.exp(x - largest) for s, i in members for x in logits[s][i])
        for s, i in members:
            couplings[s][i] = [math.exp(x - largest) / total for x in logits[s][i]]
    return couplings


def _add_coordinates(site):
    """Add (row, column) to the right-hand column of the first two rows of square vote matrices."""
    for vote, (row, column) in zip(site.votes, site.coordinates, strict=True):
        for own in vote:
            side = math.isqrt(len(own))
            own[side - 1] += row
            own[2 * side - 1] += column
