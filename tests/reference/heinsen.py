"""Heinsen 2022: efficient vector routing, after the authors' code, for any votes."""

import math

from .arithmetic import dot, log_sigmoid, sigmoid, softmax, weighted_sum
from .sites import Parents


def route(sites, p, iterations, normalize, mask):
    return [_route(site, p, iterations, normalize, mask) for site in sites]


def _route(site, p, iterations, normalize, mask):
    slots, parents, x = range(len(site.votes)), range(len(site.votes[0])), site.slots
    allowed = [[not mask or p["mask"][i][j] != 0 for j in parents] for i in slots]
    f = []
    for i in slots:
        score = dot(x[i], p["score_weight"][i]) / math.sqrt(len(slots)) + p["score_bias"][i]
        f.append(sigmoid(score) * site.activation[i])
    s, pose, phi = [[0.0] * len(parents) for _ in slots], [], []
    for t in range(iterations):
        if t:
            predicted = []
            for j in parents:
                normed = _layer_norm(pose[j])
                predicted.append(
                    [
                        sum(normed[d] * p["prediction"][d][k] for d in range(len(normed))) * p["prediction_gain"][j][k]
                        + p["prediction_bias"][j][k]
                        for k in range(len(x[0]))
                    ]
                )
            s = [
                [
                    log_sigmoid(dot(x[i], predicted[j]) * p["similarity_weight"][i][j] + p["similarity_bias"][i][j])
                    for j in parents
                ]
                for i in slots
            ]
        phi = []
        for i in slots:
            chosen = iter(softmax([s[i][j] for j in parents if allowed[i][j]]))
            row = []
            for j in parents:
                use = f[i] * next(chosen) if allowed[i][j] else 0.0
                row.append(p["beta_use"][i][j] * use - p["beta_ign"][i][j] * ((f[i] if allowed[i][j] else 0.0) - use))
            phi.append(row)
        pose = weighted_sum(site, phi)
    return Parents([_layer_norm(v) for v in pose] if normalize else pose, None, phi)


def _layer_norm(v):
    if len(v) == 1:
        return v
    mean = sum(v) / len(v)
    variance = sum((x - mean) ** 2 for x in v) / len(v)
    return [(x - mean) / math.sqrt(variance + 1e-5) for x in v]
