"""Routing algorithms, one file each. A file added to this package is discovered automatically."""

from torchcaps.routing.attention import Attention
from torchcaps.routing.base import (
    ROUTINGS,
    Coefficient,
    Geometry,
    Routing,
    State,
    Trace,
    as_routing,
    create_routing,
    run_routing,
)
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.routing.equilibrium import Equilibrium, Solution, count_one_step_gradients
from torchcaps.routing.heinsen import Heinsen, chain_credit
from torchcaps.routing.heinsen_em import HeinsenEM
from torchcaps.routing.inverted_attention import InvertedAttention
from torchcaps.routing.kmeans import KMeans
from torchcaps.routing.quadratic import Quadratic, RoutingDivergence
from torchcaps.routing.route import route
from torchcaps.routing.self_attention import SelfAttention
from torchcaps.routing.self_routing import SelfRouting
from torchcaps.routing.trainable import Trainable
from torchcaps.routing.uniform import Uniform
from torchcaps.routing.variational_bayes import VariationalBayes

__all__ = [
    "EM",
    "Attention",
    "Coefficient",
    "Dynamic",
    "Equilibrium",
    "Geometry",
    "Heinsen",
    "HeinsenEM",
    "InvertedAttention",
    "KMeans",
    "Quadratic",
    "Routing",
    "RoutingDivergence",
    "SelfAttention",
    "SelfRouting",
    "Solution",
    "State",
    "Trace",
    "Trainable",
    "Uniform",
    "VariationalBayes",
    "as_routing",
    "chain_credit",
    "count_one_step_gradients",
    "create_routing",
    "list_routings",
    "route",
    "run_routing",
]


def __getattr__(name: str) -> type[Routing]:
    """Find the class of a routing in a file that is not imported above."""
    if not name.startswith("_"):
        for registered in ROUTINGS:
            cls = ROUTINGS.get(registered)
            if cls.__name__ == name and cls.__module__.startswith(f"{__name__}."):
                return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def list_routings(pattern: str | None = None) -> list[str]:
    """Return the registered names, sorted; ``pattern`` filters them by shell wildcards.

    >>> "dynamic" in list_routings()
    True
    """
    return ROUTINGS.list(pattern)
