"""Reference implementations: the loops of the papers in plain Python, without tensors and without the package.

Slow and obvious on purpose. The module of each routing has one function::

    route(sites, p, **fields) -> list of Parents, one for each site

where a site is a position of the parents' grid, ``p`` the routing's coefficients as nested lists by name, and the
fields those of the routing's dataclass.
"""
