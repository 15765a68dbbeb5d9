"""The published numbers, held against a second copy; parameters, against what the models have."""

import re
from pathlib import Path

import pytest

from torchcaps.papers import find_paper, list_papers
from torchcaps.reproduce.schema import Cell, Measure, Parameters, Run
from torchcaps.reproduce.statistics import n_parameters

LIST = Path(__file__).with_name("published.txt")
LINE = re.compile(r"(\w+) (\w+) \| (.+?) \| (.+?) \| ([\d.]+)(M?)(?: ± ([\d.]+))?")


def copied() -> dict[tuple[str, str, str, str], tuple[float, float | None]]:
    found = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        paper, item, row, column, number, millions, spread = match.groups()
        value = float(number) * (1e6 if millions else 1)
        assert (paper, item, row, column) not in found, line
        found[paper, item, row, column] = value, None if spread is None else float(spread)
    return found


def cells() -> list[tuple[tuple[str, str, str, str], Cell]]:
    return [
        ((paper.name, item.name, row.label, column), cell)
        for paper in list_papers()
        for item in paper.items
        for row in item.rows
        for column, cell in row.cells.items()
    ]


def test_every_published_number_is_the_papers() -> None:
    ours = {place: (cell.printed.value, cell.printed.spread) for place, cell in cells() if cell.printed is not None}
    theirs = copied()
    assert set(ours) == set(theirs)
    for place, (value, spread) in theirs.items():
        assert ours[place][0] == pytest.approx(value, rel=1e-4), place
        assert ours[place][1] == spread, place


def test_numbers_that_cannot_be_right_say_so() -> None:
    notes = {place: cell.printed.note for place, cell in cells() if cell.printed is not None and cell.printed.note}
    for place, words in (
        (("chen2019", "blackbox", "CNN", "attacked"), "digit 1"),
        (("chen2019", "blackbox", "FC G-CapsNets*", "attacked"), "digit 5"),
        (("chen2019", "table3", "GAN epoch 4", "CNN"), "misprinted"),
        (("choi2019", "table3", "random vectors, the stated procedure", "x+"), "wrong axis"),
        (("choi2019", "table2", "L = 2, D = 32", "size"), "8.3M"),
        (("sabour2017", "table1", "CapsNet, 3 iterations, reconstruction", "MultiMNIST"), "5.0"),
        (("tsai2020", "table1", "Inverted attention, ResNet", "CIFAR-10"), "best"),
    ):
        assert words in notes[place]


UNLIKE = {  # what no reading of the paper gives, each with a note that says so
    ("choi2019", "table2", "L = 2, D = 32", "size"),
    ("chen2019", "table2", "CNN", "size, CIFAR-10"),
    ("chen2019", "table2", "CapsNets**", "size, CIFAR-10"),
    ("chen2019", "table2", "Multi-layer G-CapsNets", "size, CIFAR-10"),
}


def printed_millions() -> dict[tuple[str, ...], tuple[int, int]]:
    """How many of which unit are printed: 7.3M is 73 of 100,000."""
    matches = [LINE.fullmatch(line) for line in LIST.read_text().splitlines()]
    found = {}
    for match in matches:
        if match is not None and match[6]:
            whole, _, digits = match[5].partition(".")
            found[match.group(1, 2, 3, 4)] = int(whole + digits), 10 ** (6 - len(digits))
    return found


def test_parameters_are_those_that_are_printed() -> None:
    """To every printed digit, rounded or cut off; but for four, whose notes say why not."""
    printed, unlike, counted = printed_millions(), set(), 0
    for place, cell in cells():
        if isinstance(cell.source, Parameters) and cell.printed is not None:
            (number, unit), count = printed[place], n_parameters(cell.source.run)
            if number not in (count // unit, (count + unit // 2) // unit):
                unlike.add(place)
                assert cell.printed.note, place
            counted += 1
    assert unlike == UNLIKE
    assert counted == len(printed)


def test_claims_and_columns_name_what_is_there() -> None:
    for paper in list_papers():
        assert all((paper.claimed, paper.cost, paper.scale, paper.deviations, paper.citation))
        assert len({item.name for item in paper.items}) == len(paper.items)
        for item in paper.items:
            labels = [row.label for row in item.rows]
            assert len(set(labels)) == len(labels)
            assert item.about.endswith(".")
            for row in item.rows:
                assert set(row.cells) <= set(item.columns), (item.name, row.label)
            for claim in item.claims:
                for row, column in (claim.better, claim.worse):
                    (found,) = (r for r in item.rows if r.label == row)
                    assert column in found.cells


def test_measurements_have_names_of_their_own() -> None:
    named: dict[str, Measure] = {}
    for paper in list_papers():
        for item in paper.items:
            for source in item.sources():
                if isinstance(source, Measure):
                    assert named.setdefault(source.name, source) == source
                    assert source.name.startswith(paper.name)
    assert len(named) > 20


@pytest.mark.parametrize(
    ("paper", "items"),
    [
        ("sabour2017", "table1 fig3 fig4 fig5 sec52 sec7 figa1 figa2"),
        ("choi2019", "table1 table2 cost fig3 table3 fig4 fig5"),
        ("tsai2020", "table1 fig4 ablations fig4cost fig5"),
        ("chen2019", "table2 multi table3 fig2 blackbox whitebox"),
        ("yang2021", "table2 fig2 fig3 rates lost fig4 multimnist assumptions"),
    ],
)
def test_nothing_is_missing(paper: str, items: str) -> None:
    assert [item.name for item in find_paper(paper).items] == items.split()


def test_a_run_that_two_tables_name_is_one_run() -> None:
    (fig4, table1) = (find_paper("tsai2020").item(name) for name in ("fig4", "table1"))
    shared = [source for source in fig4.sources() if isinstance(source, Run) and source in table1.sources()]
    assert len(shared) == 3


SPECIFICATION = Path(__file__).resolve().parents[3] / "shared/papers.md"  # beside a checkout that has it, as CI does
SECTIONS = {"sabour2017": "1", "choi2019": "2", "tsai2020": "3", "chen2019": "5", "yang2021": "6"}
OTHERWISE = {  # how the same number stands there
    ("sabour2017", "figa1", "iteration 5", "trained"): "1e-5",
    ("choi2019", "cost", "CapsuleNet", "ratio"): "37.2 s vs 199.5 s",
    ("chen2019", "table2", "Multi-layer G-CapsNets", "size, CIFAR-10"): "716K",
}


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the specification of the papers is not beside the checkout")
def test_every_published_number_stands_in_the_specification() -> None:
    """In the section on its paper, or in that on parameters."""
    parts = re.split(r"\n# (\d+)\. ", SPECIFICATION.read_text())
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    for place, (value, spread) in copied().items():
        text = sections[SECTIONS[place[0]]] + sections["8"]
        for number in (value, spread):
            if number is not None:
                forms = [OTHERWISE[place]] if place in OTHERWISE else printed_forms(number)
                assert any(re.search(rf"(?<![\d.]){re.escape(form)}(?!\.?\d)", text) for form in forms), (place, number)


def printed_forms(number: float) -> set[str]:
    """0.45 may be printed as .45, 7,990,000 as 7.99M, 9,400 as 9.4K, and 0.7 as 0.700."""
    plain = [f"{number:g}", f"{number:.1f}", f"{number:.2f}", f"{number:.3f}"]
    kept = {form for form in plain if float(form) == number}
    if number >= 1_000:
        kept |= {f"{number / 1e3:g}K", f"{number / 1e6:g}M", f"{number / 1e6:.1f}M", f"{number / 1e6:.2f}M"}
    return kept | {form.removeprefix("0") for form in kept if form.startswith("0.")}
