"""The routings, one file each. A file dropped into this folder is found by itself."""

import importlib
import pkgutil

from torchcaps.routing.attention import Attention
from torchcaps.routing.base import (
    REGISTRY,
    Coefficient,
    Geometry,
    Routing,
    State,
    Trace,
    as_routing,
    create_routing,
    iterate,
)
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.routing.inverted_attention import InvertedAttention
from torchcaps.routing.quadratic import Quadratic, RoutingDivergence
from torchcaps.routing.route import route
from torchcaps.routing.trainable import Trainable
from torchcaps.routing.uniform import Uniform

__all__ = [
    "EM",
    "Attention",
    "Coefficient",
    "Dynamic",
    "Geometry",
    "InvertedAttention",
    "Quadratic",
    "Routing",
    "RoutingDivergence",
    "State",
    "Trace",
    "Trainable",
    "Uniform",
    "as_routing",
    "create_routing",
    "iterate",
    "list_routings",
    "route",
]

# The imports above are for type checkers and readers; this one finds what they don't name.
for _module in pkgutil.iter_modules(__path__):
    _found = importlib.import_module(f"{__name__}.{_module.name}")
    for _name, _value in vars(_found).items():
        if isinstance(_value, type) and issubclass(_value, Routing) and _value.__module__ == _found.__name__:
            globals()[_name] = _value


def list_routings() -> list[str]:
    """Return the names of all routings, sorted.

    >>> "dynamic" in list_routings()
    True
    """
    return sorted(REGISTRY)
