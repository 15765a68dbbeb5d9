"""Which papers there are."""

from torchcaps.papers import chen2019, choi2019, sabour2017, tsai2020, yang2021
from torchcaps.reproduce.schema import Item, Paper

__all__ = ["find_columns", "find_item", "find_paper", "find_rows", "list_papers"]

PAPERS = tuple(module.PAPER for module in (sabour2017, choi2019, tsai2020, chen2019, yang2021))


def list_papers() -> tuple[Paper, ...]:
    """Return the papers, in the order in which they were built."""
    return PAPERS


def find_paper(name: str) -> Paper:
    """Return a paper by its name; list what there is where there is no such one."""
    known = {paper.name: paper for paper in PAPERS}
    if name not in known:
        raise ValueError(f"there is no paper {name!r}: there are {', '.join(known)}")
    return known[name]


def find_item(paper: str, item: str) -> tuple[Paper, Item]:
    """Return a paper and one of its tables and figures."""
    found = find_paper(paper)
    return found, found.item(item)


def find_rows(item: Item, words: list[str]) -> tuple[str, ...]:
    """Return the labels of rows by their number, counted from 1, or by words that stand in them.

    Each word must fit a row; what fits none lists the rows.
    """
    return _found(item, words, [row.label for row in item.rows], "row")


def find_columns(item: Item, words: list[str]) -> tuple[str, ...]:
    """Return the names of columns in the same way."""
    return _found(item, words, list(item.columns), "column")


def _found(item: Item, words: list[str], known: list[str], what: str) -> tuple[str, ...]:
    chosen: set[str] = set()
    for word in words:
        if word.isdigit() and 1 <= int(word) <= len(known):
            fitting = {known[int(word) - 1]}
        else:
            exact = {name for name in known if name.lower() == word.lower()}
            fitting = exact or {name for name in known if word.lower() in name.lower()}
        if not fitting:
            listed = "; ".join(f"{number} {name!r}" for number, name in enumerate(known, start=1))
            there = f"its {what}s are {listed}" if listed else "it has none to choose from"
            raise ValueError(f"{item.title} has no {what} {word!r}: {there}")
        chosen |= fitting
    return tuple(name for name in known if name in chosen)
