"""Choi 2019, eq. 5 to 9, with the attention kernel that matches the published parameter counts."""

import math

from .arithmetic import softmax, weighted_sum
from .sites import Parents


def route(sites, p, residual, dropout):
    """Route; ``dropout`` is ignored, since layers are compared in eval mode."""
    result = []
    for site in sites:
        channels, n_parents, size = len(site.votes), len(site.votes[0]), len(site.votes[0][0])
        coupling = [[0.0] * n_parents for _ in range(channels)]
        for n in range(n_parents):
            logits = []
            for m in range(channels):
                logit = 0.0
                for other in range(channels):
                    for d in range(size):
                        logit += p["attention"][n][m][other][d] * site.votes[other][n][d]
                logits.append(logit)
            for m, c in enumerate(softmax(logits)):
                coupling[m][n] = c
        pose = []
        for n, s in enumerate(weighted_sum(site, coupling)):
            u = []
            for e in range(size):
                value = p["offset"][n][e] + sum(s[d] * p["matrix"][n][d][e] for d in range(size))
                if residual:
                    value += site.children[n][e]
                u.append(math.tanh(value))
            pose.append(u)
        result.append(Parents(pose, None, coupling))
    return result
