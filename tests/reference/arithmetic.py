"""Arithmetic of nested lists."""

import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a):
    return math.sqrt(dot(a, a))


def squash(s):
    """Sabour 2017, eq. 1, as printed."""
    n = norm(s)
    if n == 0:
        return [0.0] * len(s)
    return [n * n / (1 + n * n) * x / n for x in s]


def exp_squash(v):
    """Chen 2019, not numbered."""
    n = norm(v)
    return list(v) if n == 0 else [(1 - math.exp(-n)) * x / n for x in v]


def softmax(logits):
    largest = max(logits)
    powers = [math.exp(x - largest) for x in logits]
    return [power / sum(powers) for power in powers]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def weighted_sum(site, coupling):
    """Return s[j][d], the sum over the slots i of coupling[i][j] * votes[i][j][d]."""
    n_parents, size = len(site.votes[0]), len(site.votes[0][0])
    return [
        [sum(coupling[i][j] * site.votes[i][j][d] for i in range(len(site.votes))) for d in range(size)]
        for j in range(n_parents)
    ]
