"""Heinsen 2019: generative matrix routing, after the authors' code."""

import math

from .arithmetic import log_sigmoid, sigmoid, softmax, weighted_sum
from .sites import Parents

EPS = 1e-5


def route(sites, p, iterations, activation):
    return [_route(site, p, iterations, activation) for site in sites]


def _route(site, p, iterations, activation):
    slots, parents, dims = range(len(site.votes)), range(len(site.votes[0])), range(len(site.votes[0][0]))
    r = [[1 / len(parents)] * len(parents) for _ in slots]
    score, mean, variance = [], [], []
    for t in range(iterations):
        if t:
            r = []
            for i in slots:
                logits = []
                for j in parents:
                    x = log_sigmoid(score[j])
                    for d in dims:
                        x -= (site.votes[i][j][d] - mean[j][d]) ** 2 / (2 * variance[j][d])
                        x -= math.log(variance[j][d]) / 2
                    logits.append(x)
                r.append(softmax(logits))
        use = [[site.activation[i] * r[i][j] for j in parents] for i in slots]
        score = [
            sum(p["beta_use"][i][j] * use[i][j] - p["beta_ign"][i][j] * (site.activation[i] - use[i][j]) for i in slots)
            for j in parents
        ]
        mass = [sum(use[i][j] for i in slots) + EPS for j in parents]
        w = [[use[i][j] / mass[j] for j in parents] for i in slots]
        mean = weighted_sum(site, w)
        variance = [
            [sum(w[i][j] * (site.votes[i][j][d] - mean[j][d]) ** 2 for i in slots) + EPS for d in dims] for j in parents
        ]
    return Parents(mean, [sigmoid(a) if activation == "sigmoid" else a for a in score], r)
