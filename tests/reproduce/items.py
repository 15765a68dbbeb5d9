"""Helpers of the tests that reproduce items."""

from pathlib import Path
from typing import Any

from torchcaps.papers import find_item, list_papers
from torchcaps.reproduce.planner import TaskPlan, make_plan
from torchcaps.reproduce.runner import PlanProgress, execute_plan
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.store import RecordStore


def smoke_store(directory: Path) -> RecordStore:
    """Return a new store, without cached records, of the scale smoke."""
    return RecordStore("smoke", directory / "results", directory / "work")


def reproduce_item(item: Item, store: RecordStore, **options: Any) -> tuple[TaskPlan, list[str]]:
    """Execute the plan of an item with one seed; return the plan and the printed lines."""
    lines: list[str] = []
    plan = make_plan(item, store, 1, timed=False, num_threads=1, **options)
    assert execute_plan(plan, store, PlanProgress(plan, False, lines.append), num_threads=1) == []
    return plan, lines


def reproduce_smoke(directory: Path, paper: str, item: str) -> tuple[Paper, Item, RecordStore]:
    """Reproduce an item of a paper at the scale smoke."""
    store = smoke_store(directory)
    paper_declaration, item_declaration = find_item(paper, item)
    reproduce_item(item_declaration, store)
    return paper_declaration, item_declaration, store


def all_items() -> list[tuple[Paper, Item]]:
    """Return every item with its paper."""
    return [(paper, item) for paper in list_papers() for item in paper.items]
