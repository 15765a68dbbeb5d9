"""The reproduced papers: one module per paper declares its tables, figures and published numbers.

A module of this package with a constant ``PAPER`` is found without being listed anywhere.

>>> find_paper("sabour2017").name
'sabour2017'
"""

from torchcaps._core.registry import Registry
from torchcaps.reproduce.schema import Item, Paper

__all__ = ["PAPERS", "find_item", "find_paper", "list_papers"]

PAPERS = Registry[Paper]("paper", __name__)


def find_paper(name: str) -> Paper:
    """Return a paper by name.

    >>> len(find_paper("sabour2017").items) > 0
    True
    """
    return PAPERS.get(name)


def find_item(paper: str, item: str) -> tuple[Paper, Item]:
    """Return a paper and one of its tables and figures.

    >>> paper, item = find_item("sabour2017", "table1")
    >>> paper.name, item.name
    ('sabour2017', 'table1')
    """
    declaration = find_paper(paper)
    return declaration, declaration.item(item)


def list_papers() -> tuple[Paper, ...]:
    """Return all papers, ordered by the year in their names.

    >>> [paper.name for paper in list_papers()][:2]
    ['sabour2017', 'chen2019']
    """
    names = sorted(PAPERS.list(), key=lambda name: ("".join(filter(str.isdigit, name)), name))
    return tuple(PAPERS.get(name) for name in names)
