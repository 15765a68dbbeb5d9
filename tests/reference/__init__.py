"""The papers' loops, written out: plain Python, floats of 64 bits, no tensors, nothing of the package.

Slow and obvious on purpose. Each routing's file has one function::

    route(sites, p, **fields) -> list of Parents, one for each site

where a site is a place of the parents' grid, ``p`` the routing's coefficients as nested lists, and the fields
those of the routing.
"""
