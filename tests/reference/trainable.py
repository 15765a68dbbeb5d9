"""Chen 2019: trainable couplings and the exponential squash (not numbered in the paper)."""

from .arithmetic import exp_squash, weighted_sum
from .sites import Parents


def route(sites, p, relu):
    result = []
    for site in sites:
        coupling = p["coupling"]
        for index in site.position:
            coupling = coupling[index]
        pose = weighted_sum(site, coupling)
        if relu == "before":
            pose = [[max(0.0, x) for x in v] for v in pose]
        pose = [exp_squash(v) for v in pose]
        if relu == "after":
            pose = [[max(0.0, x) for x in v] for v in pose]
        result.append(Parents(pose, None, coupling))
    return result
