"""Uniform couplings, the baseline without routing: the first iteration of Sabour 2017, Procedure 1."""

from .arithmetic import squash, weighted_sum
from .sites import Parents


def route(sites, p, over):
    result = []
    for site in sites:
        n_parents = len(site.votes[0])
        value = 1 / n_parents if over == "parents" else 1 / len(site.votes)
        coupling = [[value] * n_parents for _ in site.votes]
        result.append(Parents([squash(s) for s in weighted_sum(site, coupling)], None, coupling))
    return result
