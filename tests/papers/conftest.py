"""A folder of records and runs for each process of the tests: what two items share is trained once in it."""

from pathlib import Path

import pytest

from torchcaps.reproduce.planner import Plan, make_plan
from torchcaps.reproduce.runner import Bar, work_through
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.store import Store


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("papers")


@pytest.fixture
def store(folder: Path) -> Store:
    return Store("smoke", folder / "results", folder / "work")


def reproduced(item: Item, store: Store, **options: object) -> tuple[Plan, list[str]]:
    """Run an item, and return its plan and what was said."""
    said: list[str] = []
    plan = make_plan(item, store, 1, timed=False, num_threads=1, **options)  # type: ignore[arg-type]
    problems = work_through(plan, store, Bar(plan, False, said.append), num_threads=1)
    assert not problems
    return plan, said


def every_item() -> list[tuple[Paper, Item]]:
    from torchcaps.papers import list_papers

    return [(paper, item) for paper in list_papers() for item in paper.items]
