"""Yang 2021: the forward pass, and the ascent step with its matrices written out."""

import math

from .arithmetic import dot, squash, weighted_sum
from .sites import Parents


def route(sites, p, penalty, method, lr, penalty_weight, reduction, objective, initial, limit):
    """Route; the fields of the quadratic program do not affect the forward pass."""
    return [
        Parents([squash(v) for v in weighted_sum(site, p["coefficient"])], None, p["coefficient"]) for site in sites
    ]


def objective_value(votes, b, delta, penalty_weight, penalty):
    """Return F of eq. 12 (L2) or eq. 14 (L1) by its matrices; votes [k][i][j][d], b [i][j], delta [k][j]."""
    total = 0.0
    for j in range(len(b[0])):
        column = [row[j] for row in b]
        for k in range(len(votes)):
            matrix = [[dot(a[j], c[j]) for c in votes[k]] for a in votes[k]]  # U U'
            total += delta[k][j] * dot(column, [dot(row, column) for row in matrix])
        if penalty == "l2":
            total -= penalty_weight * dot(column, column)
        else:
            total -= penalty_weight * sum(abs(x) for x in column)
    return total


def paper_step(votes, b, delta, lr, penalty_weight, penalty):
    """Return b after one step of eq. 13 (L2) or 15 (L1): sum over the batch, with the factor 2 of lambda as printed."""
    updated = []
    for i in range(len(b)):
        row = []
        for j in range(len(b[0])):
            quadratic = 0.0
            for k in range(len(votes)):
                for other in range(len(b)):
                    quadratic += delta[k][j] * dot(votes[k][i][j], votes[k][other][j]) * b[other][j]
            sign = (b[i][j] > 0) - (b[i][j] < 0)
            penalty_gradient = b[i][j] if penalty == "l2" else sign
            row.append(b[i][j] + 2 * lr * (quadratic - penalty_weight * penalty_gradient))
        updated.append(row)
    return updated


def adam_steps(gradient, b, lr, n_steps):
    """Return b after ``n_steps`` ascent steps of Adam; ``gradient`` is a function of b."""
    first = [[0.0] * len(row) for row in b]
    second = [[0.0] * len(row) for row in b]
    for n in range(1, n_steps + 1):
        g = gradient(b)
        for i in range(len(b)):
            for j in range(len(b[0])):
                first[i][j] = 0.9 * first[i][j] + 0.1 * g[i][j]
                second[i][j] = 0.999 * second[i][j] + 0.001 * g[i][j] ** 2
        b = [
            [
                b[i][j] + lr * (first[i][j] / (1 - 0.9**n)) / (math.sqrt(second[i][j] / (1 - 0.999**n)) + 1e-8)
                for j in range(len(b[0]))
            ]
            for i in range(len(b))
        ]
    return b
