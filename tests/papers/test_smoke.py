"""Every table and figure runs at the scale smoke and writes its files; plain pytest runs a sample of them."""

import pytest
from PIL import Image

from tests.reproduce.items import all_items, reproduce_item
from tests.sampling import all_cases, covering_sample
from torchcaps.reproduce.planner import make_plan
from torchcaps.reproduce.render import write_item
from torchcaps.reproduce.schema import Cell, Item, Paper, ParameterCount
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordStore

SMOKE_EPOCHS = 2


def has_number_at_smoke(cell: Cell) -> bool:
    """Whether a record of the scale smoke must have the number of a cell.

    A network may classify all images correctly, or none, and there are fewer routing iterations and epochs of the GAN
    than at other scales.
    """
    if cell.source is None or "correct" in cell.metric:
        return False
    last = cell.metric.split()[-1]
    return not (last.isdigit() and int(last) > SMOKE_EPOCHS)


# These measure the memory of many models in processes of their own, or attack every image of several networks.
SLOW = {("tsai2020", "fig5"), ("tsai2020", "fig4cost"), ("chen2019", "whitebox")}


def sampled_items() -> list[tuple[Paper, Item]]:
    if all_cases():
        return all_items()
    cases = [(paper, item) for paper, item in all_items() if (paper.name, item.name) not in SLOW]
    return covering_sample(cases, 5, [lambda case: case[0].name, lambda case: bool(case[1].draw)])


@pytest.mark.parametrize(
    ("paper", "item"),
    [pytest.param(paper, item, id=f"{paper.name}-{item.name}") for paper, item in sampled_items()],
)
def test_an_item_runs_and_writes_its_files(paper: Paper, item: Item, store: RecordStore) -> None:
    reproduce_item(item, store)
    results = Results(item, store)
    cells = [(row.label, column, cell) for row in item.rows for column, cell in row.cells.items()]
    missing = [c[:2] for c in cells if has_number_at_smoke(c[2]) and results.estimate(c[2]) is None]
    assert missing == []
    table, *figures = write_item(paper, item, store)
    text = table.read_text()
    assert text.startswith(f"### {paper.name}, {item.title}")
    assert "Scale: smoke." in text
    has_figure = any(not isinstance(source, ParameterCount) for source in item.sources())
    assert [path.suffix for path in figures] == [".png"] * has_figure
    for path in figures:
        with Image.open(path) as image:
            assert min(image.size) > 200
            assert len(image.convert("L").getcolors(1 << 16) or ()) > 10  # not empty
    assert make_plan(item, store, 1, timed=False).pending == []  # nothing is executed again
