"""Yang 2021: the forward pass, and the ascent with the matrices written out."""

import math

from .arithmetic import dot, squash, weighted_sum
from .sites import Parents


def route(sites, p, penalty, method, rate, strength, reduction, objective, initial, limit):
    """The forward pass knows nothing of the program that made the coefficients."""
    return [
        Parents([squash(v) for v in weighted_sum(site, p["coefficient"])], None, p["coefficient"]) for site in sites
    ]


def objective_value(votes, b, delta, strength, penalty):
    """F of eq. 12 (L2) and eq. 14 (L1); votes [k][i][j][d], b [i][j], delta [k][j]. The m x m matrix and all."""
    total = 0.0
    for j in range(len(b[0])):
        column = [row[j] for row in b]
        for k in range(len(votes)):
            matrix = [[dot(a[j], c[j]) for c in votes[k]] for a in votes[k]]  # U U'
            total += delta[k][j] * dot(column, [dot(row, column) for row in matrix])
        if penalty == "l2":
            total -= strength * dot(column, column)
        else:
            total -= strength * sum(abs(x) for x in column)
    return total


def paper_step(votes, b, delta, rate, strength, penalty):
    """Eq. 13 and 15, sum over the batch, with the factor 2 before lambda as printed."""
    moved = []
    for i in range(len(b)):
        row = []
        for j in range(len(b[0])):
            quadratic = 0.0
            for k in range(len(votes)):
                for other in range(len(b)):
                    quadratic += delta[k][j] * dot(votes[k][i][j], votes[k][other][j]) * b[other][j]
            sign = (b[i][j] > 0) - (b[i][j] < 0)
            pull = b[i][j] if penalty == "l2" else sign
            row.append(b[i][j] + 2 * rate * (quadratic - strength * pull))
        moved.append(row)
    return moved


def adam_steps(slope, b, rate, n_steps):
    """So many steps of Adam up a function of [i][j] with that slope (itself a function)."""
    first = [[0.0] * len(row) for row in b]
    second = [[0.0] * len(row) for row in b]
    for n in range(1, n_steps + 1):
        g = slope(b)
        for i in range(len(b)):
            for j in range(len(b[0])):
                first[i][j] = 0.9 * first[i][j] + 0.1 * g[i][j]
                second[i][j] = 0.999 * second[i][j] + 0.001 * g[i][j] ** 2
        b = [
            [
                b[i][j] + rate * (first[i][j] / (1 - 0.9**n)) / (math.sqrt(second[i][j] / (1 - 0.999**n)) + 1e-8)
                for j in range(len(b[0]))
            ]
            for i in range(len(b))
        ]
    return b
