"""The published numbers against a second copy, and parameter counts against the models."""

import re
from pathlib import Path

import pytest

from torchcaps.papers import find_paper, list_papers
from torchcaps.reproduce.schema import Cell, Measurement, ParameterCount, Run
from torchcaps.reproduce.statistics import count_parameters, improvement

PUBLISHED = Path(__file__).with_name("published.txt")
LINE = re.compile(r"(\w+) (\w+) \| (.+?) \| (.+?) \| ([\d.]+)(M?)(?: ± ([\d.]+))?")
Location = tuple[str, str, str, str]  # paper, item, row, column


def published_lines() -> dict[Location, tuple[str, str, str | None]]:
    """Return (number, "M" or "", spread) of each line of published.txt."""
    lines = {}
    for line in PUBLISHED.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        location = match[1], match[2], match[3], match[4]
        assert location not in lines, line
        lines[location] = match[5], match[6], match[7]
    return lines


def all_cells() -> list[tuple[Location, Cell]]:
    return [
        ((paper.name, item.name, row.label, column), cell)
        for paper in list_papers()
        for item in paper.items
        for row in item.rows
        for column, cell in row.cells.items()
    ]


def test_published_numbers_equal_the_second_copy() -> None:
    declared = {where: cell.printed for where, cell in all_cells() if cell.printed is not None}
    copied = published_lines()
    assert set(declared) == set(copied)
    for where, (number, millions, spread) in copied.items():
        value = float(number) * (1e6 if millions else 1)
        assert declared[where].value == pytest.approx(value, rel=1e-4), where
        assert declared[where].spread == (None if spread is None else float(spread)), where


@pytest.mark.parametrize(
    "location",
    [
        ("chen2019", "blackbox", "CNN", "attacked"),
        ("chen2019", "blackbox", "FC G-CapsNets*", "attacked"),
        ("chen2019", "table3", "GAN epoch 4", "CNN"),
        ("choi2019", "table3", "random vectors, the stated procedure", "x+"),
        ("choi2019", "table2", "L = 2, D = 32", "size"),
        ("sabour2017", "table1", "CapsNet, 3 iterations, reconstruction", "MultiMNIST"),
        ("tsai2020", "table1", "Inverted attention, ResNet", "CIFAR-10"),
    ],
    ids=" ".join,
)
def test_implausible_published_numbers_have_a_note(location: Location) -> None:
    printed = dict(all_cells())[location].printed
    assert printed is not None
    assert printed.note != "", printed


UNMATCHED_COUNTS = {  # no reading of the paper gives these numbers; each has a note
    ("choi2019", "table2", "L = 2, D = 32", "size"),
    ("chen2019", "table2", "CNN", "size, CIFAR-10"),
    ("chen2019", "table2", "CapsNets**", "size, CIFAR-10"),
    ("chen2019", "table2", "Multi-layer G-CapsNets", "size, CIFAR-10"),
}


def test_parameter_counts_match_every_printed_digit() -> None:
    """Rounded or truncated, except for four numbers whose notes explain the difference."""
    printed = {where: number for where, (number, millions, _) in published_lines().items() if millions}
    counted = {
        where: (cell.source.run, cell.printed)
        for where, cell in all_cells()
        if isinstance(cell.source, ParameterCount) and cell.printed is not None
    }
    assert set(counted) == set(printed)
    unmatched = set()
    for where, (run, declared) in counted.items():
        whole, _, digits = printed[where].partition(".")
        number, unit = int(whole + digits), 10 ** (6 - len(digits))  # 7.3M is 73 units of 100,000
        count = count_parameters(run)
        if number not in (count // unit, (count + unit // 2) // unit):
            unmatched.add(where)
            assert declared.note, where
    assert unmatched == UNMATCHED_COUNTS


def test_declarations_are_complete_and_consistent() -> None:
    for paper in list_papers():
        assert all((paper.summary, paper.cost, paper.cpu_scale, paper.deviations, paper.citation)), paper.name
        assert len({item.name for item in paper.items}) == len(paper.items), paper.name
        for item in paper.items:
            labels = [row.label for row in item.rows]
            assert len(set(labels)) == len(labels), (paper.name, item.name)
            assert item.description.endswith("."), (paper.name, item.name)
            for row in item.rows:
                assert set(row.cells) <= set(item.columns), (item.name, row.label)
            for claim in item.claims:
                for label, column in (claim.better, claim.worse):
                    (row,) = (r for r in item.rows if r.label == label)
                    assert column in row.cells, (item.name, claim.text)


def test_printed_numbers_agree_with_the_claims_of_their_paper() -> None:
    """A claim with its numbers exchanged, or one that the paper does not make, would not."""
    compared = 0
    claims = [(paper, item, claim) for paper in list_papers() for item in paper.items for claim in item.claims]
    for paper, item, claim in claims:
        better, worse = (item.cell(*location).printed for location in (claim.better, claim.worse))
        if claim.origin == "paper" and better is not None and worse is not None:
            compared += 1
            gain = improvement(better.value, worse.value, claim.lower_is_better)
            assert gain + claim.margin > 0, (paper.name, item.name, claim.text)
    assert compared > 0


def test_measurement_names_are_unique_and_start_with_a_paper_that_has_them() -> None:
    """A number that a paper quotes from another is the measurement of that other paper."""
    by_name: dict[str, Measurement] = {}
    papers: dict[str, set[str]] = {}
    for paper in list_papers():
        for item in paper.items:
            for source in item.sources():
                if isinstance(source, Measurement):
                    assert by_name.setdefault(source.name, source) == source
                    papers.setdefault(source.name, set()).add(paper.name)
    assert papers
    for name, declared in papers.items():
        assert any(name.startswith(paper) for paper in declared), (name, declared)


@pytest.mark.parametrize(
    ("paper", "items"),
    [
        ("sabour2017", "table1 fig3 fig4 fig5 sec52 sec7 figa1 figa2 overfitting pose"),
        ("choi2019", "table1 table2 cost fig3 table3 fig4 fig5"),
        ("tsai2020", "table1 fig4 ablations fig4cost fig5"),
        ("chen2019", "table2 multi cost table3 fig2 blackbox whitebox"),
        ("yang2021", "table2 recall fig2 fig3 rates lost sparsity fig4 multimnist early assumptions"),
    ],
)
def test_every_table_and_figure_of_the_papers_is_declared(paper: str, items: str) -> None:
    assert set(items.split()) <= {item.name for item in find_paper(paper).items}


def test_a_run_of_two_tables_is_one_run() -> None:
    fig4, table1 = (find_paper("tsai2020").item(name) for name in ("fig4", "table1"))
    runs = [{source for source in item.sources() if isinstance(source, Run)} for item in (fig4, table1)]
    models = {"tsai2020_cifar10", "tsai2020_dynamic_cifar10", "tsai2020_em_cifar10"}
    assert {run.model for run in runs[0] & runs[1]} == models
