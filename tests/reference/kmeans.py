"""K-means routing of leftthomas/CapsuleLayer."""

from .arithmetic import dot, norm, softmax, squash, weighted_sum
from .sites import Parents


def route(sites, p, iterations, similarity):
    return [_route(site, iterations, similarity) for site in sites]


def _route(site, iterations, similarity):
    n_parents = len(site.votes[0])
    s = weighted_sum(site, [[1 / n_parents] * n_parents for _ in site.votes])
    for _ in range(iterations):
        coupling = [
            softmax([SIMILARITIES[similarity](v, c) for v, c in zip(vote, s, strict=True)]) for vote in site.votes
        ]
        s = weighted_sum(site, coupling)
    return Parents([squash(c) for c in s], None, coupling)


def _dot(v, s):
    return dot(v, s) / norm(s) if norm(s) else 0.0


def _cosine(v, s):
    return dot(v, s) / (norm(v) * norm(s)) if norm(v) * norm(s) else 0.0


def _tanimoto(v, s):
    below = dot(v, v) + dot(s, s) - dot(v, s)
    return dot(v, s) / below if below else 0.0


def _pearson(v, s):
    return _cosine([x - sum(v) / len(v) for x in v], [x - sum(s) / len(s) for x in s])


SIMILARITIES = {"dot": _dot, "cosine": _cosine, "tanimoto": _tanimoto, "pearson": _pearson}
