"""Every table and figure runs, at the scale smoke, and leaves its files."""

import json

import pytest
from PIL import Image

from tests.papers.conftest import every_item, reproduced
from torchcaps.reproduce.outputs import write_item
from torchcaps.reproduce.planner import make_plan
from torchcaps.reproduce.schema import Item, Paper, Parameters, Run
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import Job, Store


@pytest.mark.parametrize(
    ("paper", "item"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}") for pair in every_item()]
)
def test_an_item_runs_and_produces_its_files(paper: Paper, item: Item, store: Store) -> None:
    reproduced(item, store)
    results = Results(item, store)
    for row in item.rows:
        for column, cell in row.cells.items():
            # A net that mistakes no image, or all of them, has no number for the others.
            if cell.source is not None and "when_" not in cell.read and "of_wrong" not in cell.read:
                beyond = any(word in cell.read for word in ("trained", "seconds", "memory")) or _late(cell.read)
                assert results.value(cell) is not None or beyond, (row.label, column)
    table, *figures = write_item(paper, item, store)
    text = table.read_text()
    assert text.startswith(f"### {paper.name}, {item.title}")
    assert "Scale: smoke." in text
    endings = {path.suffix: path for path in figures}
    if any(not isinstance(source, Parameters) for source in item.sources()):
        assert set(endings) == {".png", ".svg"}
        with Image.open(endings[".png"]) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("L").getcolors(1 << 16) or ()) > 10, "an empty picture"
        assert endings[".svg"].read_text().rstrip().endswith("</svg>")
    plan = make_plan(item, store, 1, timed=False)
    assert not plan.open, "what is done is not done again"


def _late(read: str) -> bool:
    """Whether a number is of an epoch that the scale smoke does not come to."""
    last = read.split()[-1]
    return last.isdigit() and int(last) > 2


def test_a_record_says_everything(store: Store) -> None:
    (item,) = (item for paper, item in every_item() if (paper.name, item.name) == ("tsai2020", "table1"))
    run = item.rows[0].cells["CIFAR-10"].source
    assert isinstance(run, Run)
    reproduced(Item("one", "One", "One run.", item.columns, item.rows[:1]), store)
    record = json.loads(store.path(Job(run, 0)).read_text())
    assert record["config"]["model"] == run.model
    assert record["config"]["model_options"]["width"] == 16
    assert record["scale"] == "smoke"
    assert record["seed"] == 0
    assert record["curve"][-1]["step"] == 2
    assert record["found"]["n"] == 32
    assert record["machine"]["torch"]
    assert record["command"]
    assert record["finished"]
