"""Figures that are written."""

from pathlib import Path

import pytest

from torchcaps._core.plotting import new_figure, save_figure


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_the_same_figure_is_the_same_file(tmp_path: Path, ending: str) -> None:
    """So that a file that is kept changes when the figure does: no date, no random names."""
    files = []
    for name in ("one", "other"):
        figure = new_figure(2, 2)
        axes = figure.subplots()
        axes.scatter([1, 2], [3, 4], label="points")
        axes.legend()
        save_figure(figure, tmp_path / f"{name}{ending}")
        files.append((tmp_path / f"{name}{ending}").read_bytes())
    assert files[0] == files[1]
