"""Hinton 2018, Procedure 1, with the hyperparameters that the authors gave on OpenReview."""

import math

from .arithmetic import log_sigmoid, sigmoid
from .sites import Parents


def m_step(site, weight, p, temperature, floor):
    """Return mean, variance and activation logit of each parent; ``weight[i][j]`` is R_ij a_i."""
    means, variances, activation_logits = [], [], []
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
        activation_logits.append(temperature * (p["beta_a"][j] - cost))
    return means, variances, activation_logits


def route(sites, p, iterations, competition, inverse_temperature, annealing, variance_floor, coordinates):
    if coordinates:
        for site in sites:
            _add_coordinates(site)
    n_parents = len(sites[0].votes[0])
    n_readers = {}
    for site in sites:
        for child in site.child:
            n_readers[child] = n_readers.get(child, 0) + 1
    couplings = []
    for site in sites:
        n_competitors = [n_parents * (n_readers[child] if competition == "global" else 1) for child in site.child]
        couplings.append([[1 / n] * n_parents for n in n_competitors])
    for t in range(iterations):
        fits = []
        for site, coupling in zip(sites, couplings, strict=True):
            weight = [[r * a for r in row] for row, a in zip(coupling, site.activation, strict=True)]
            temperature = inverse_temperature * (1 - annealing ** (t + 1))
            fits.append(m_step(site, weight, p, temperature, variance_floor))
        if t < iterations - 1:
            couplings = _e_step(sites, fits, competition)
    return [
        Parents(mean, [sigmoid(x) for x in logit], coupling)
        for (mean, _, logit), coupling in zip(fits, couplings, strict=True)
    ]


def _e_step(sites, fits, competition):
    logits = []
    for site, (mean, variance, activation_logit) in zip(sites, fits, strict=True):
        rows = []
        for vote in site.votes:
            row = []
            for j in range(len(vote)):
                density = log_sigmoid(activation_logit[j])
                for v, mu, var in zip(vote[j], mean[j], variance[j], strict=True):
                    density -= (v - mu) ** 2 / (2 * var) + 0.5 * math.log(2 * math.pi * var)
                row.append(density)
            rows.append(row)
        logits.append(rows)
    # The parents that compete for a child: those of one site, or of all sites that read it.
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
        for matrix in vote:
            side = math.isqrt(len(matrix))
            matrix[side - 1] += row
            matrix[2 * side - 1] += column
