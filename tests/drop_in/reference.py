"""The equations of the routing as loops."""

from tests.reference.arithmetic import squash, weighted_sum
from tests.reference.sites import Parents


def route(sites, p, gain):
    result = []
    for site in sites:
        n_parents = len(site.votes[0])
        coupling = [[1 / n_parents] * n_parents for _ in site.votes]
        total = weighted_sum(site, coupling)
        if gain:
            total = [[p["gain"][j] * x for x in total[j]] for j in range(n_parents)]
        result.append(Parents([squash(s) for s in total], None, coupling))
    return result
