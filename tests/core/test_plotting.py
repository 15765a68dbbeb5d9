"""Figure files."""

from pathlib import Path

import pytest

from torchcaps._core.plotting import new_figure, save_figure


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_figure_files_are_reproducible(tmp_path: Path, suffix: str) -> None:
    """A file has no date and no random identifiers: it changes only if the figure does."""
    files = []
    for name in ("one", "other"):
        figure = new_figure(2, 2)
        axes = figure.subplots()
        axes.scatter([1, 2], [3, 4], label="points")
        axes.legend()
        save_figure(figure, tmp_path / f"{name}{suffix}")
        files.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert files[0] == files[1]
