"""Time per iteration of routings, forward and backward over the same votes, relative to inverted attention."""

import time
from typing import Any

import torch
from torch import Tensor

from torchcaps.bench.cases import Work
from torchcaps.bench.timing import num_threads, shortest_seconds
from torchcaps.capsules import Capsules
from torchcaps.nn import DenseCapsules
from torchcaps.routing import (
    EM,
    Dynamic,
    Heinsen,
    HeinsenEM,
    InvertedAttention,
    KMeans,
    Routing,
    SelfAttention,
    SelfRouting,
    VariationalBayes,
    run_routing,
)
from torchcaps.votes import DenseVotes

__all__ = ["REFERENCE", "measure_iterations"]

REFERENCE = "inverted_attention"
N_ITERATIONS = 3
ROUTINGS: dict[str, Routing] = {
    REFERENCE: InvertedAttention(N_ITERATIONS),
    "dynamic": Dynamic(N_ITERATIONS),
    "em": EM(N_ITERATIONS),
    "self_attention": SelfAttention(),
    "self_routing": SelfRouting(),
    "variational_bayes": VariationalBayes(N_ITERATIONS),
    "heinsen_em": HeinsenEM(N_ITERATIONS),
    "heinsen": Heinsen(N_ITERATIONS),
    "kmeans": KMeans(N_ITERATIONS),
    "kmeans, cosine": KMeans(N_ITERATIONS, "cosine"),
    "kmeans, tanimoto": KMeans(N_ITERATIONS, "tanimoto"),
    "kmeans, pearson": KMeans(N_ITERATIONS, "pearson"),
}
BATCH_SIZE = 16
SIZES = (288, 8, 10, 16)  # children, their dimension, parents, their dimension


def measure_iterations(
    repeat: int = 3, batch_size: int = BATCH_SIZE, sizes: tuple[int, int, int, int] = SIZES
) -> list[dict[str, Any]]:
    """Return a row per routing: CPU time per iteration on one thread with stored and with streamed votes.

    The time of a routing is divided by its number of iterations, 1 for those without. Stored votes are given, so that
    only the routing is timed; streamed votes are computed by it.

    Args:
        repeat: number of interleaved repetitions, of which the shortest counts.
        batch_size: number of images.
        sizes: number and dimension of children and parents.
    """
    rows: dict[str, dict[str, Any]] = {name: {"kind": "iteration", "routing": name} for name in ROUTINGS}
    with num_threads(1):
        for storage in ("stored", "streamed"):
            works = {name: _make_work(routing, storage, batch_size, sizes) for name, routing in ROUTINGS.items()}
            seconds = shortest_seconds(works, repeat, time.process_time)
            for name, routing in ROUTINGS.items():
                rows[name][f"{storage}_seconds"] = seconds[name] / getattr(routing, "iterations", 1)
            for row in rows.values():
                row[f"{storage}_ratio"] = row[f"{storage}_seconds"] / rows[REFERENCE][f"{storage}_seconds"]
    return list(rows.values())


def _make_work(routing: Routing, storage: str, batch_size: int, sizes: tuple[int, int, int, int]) -> Work:
    """Return forward and backward of a routing over votes of the same values for all routings."""
    generator = torch.Generator().manual_seed(0)
    layer = DenseCapsules(*sizes, routing=routing, streamed=storage == "streamed")
    with torch.no_grad():
        layer.weight.copy_(0.3 * torch.randn(layer.weight.shape, generator=generator))
    pose = torch.randn(batch_size, *sizes[:2], generator=generator)
    children = Capsules(pose.requires_grad_(), torch.rand(batch_size, sizes[0], generator=generator))
    stored = layer.votes(children).dense().detach().requires_grad_()

    def run() -> list[Tensor]:
        """Run the routing forward and backward; return no tensors to compare."""
        votes = layer.votes(children) if storage == "streamed" else DenseVotes(stored, routing.wire(sizes[0]))
        parents, _ = run_routing(routing, layer.coefficients.named(), votes, children, False)
        result = parents.pose.sum() + (0 if parents.activation is None else parents.activation.sum())
        result.backward()
        return []

    return Work(run, 0)
