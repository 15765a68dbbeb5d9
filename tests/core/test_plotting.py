"""Figure files."""

from pathlib import Path

import pytest
import torch

from torchcaps._core.plotting import as_rgb, new_figure, overlay_two_colors, save_figure


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


@pytest.mark.parametrize("name", ["$\\frac{$", "$a_b$", "100 $"])
def test_dollar_signs_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    """In notation of matplotlib they start formulas, so that names of classes could be invalid."""
    figure = new_figure(2, 2)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label=name)
    axes.set_title(name)
    axes.set_xticks([1, 2], [name, "other"])
    axes.set_yscale("log")  # its labels are formulas
    axes.legend()
    save_figure(figure, tmp_path / "figure.svg")
    assert {text.get_parse_math() for text in axes.get_xticklabels()} == {False}
    assert all(text.get_parse_math() for text in axes.get_yticklabels())


def test_as_rgb_repeats_grey_and_joins_stereo_pairs() -> None:
    grey = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    torch.testing.assert_close(as_rgb(grey), torch.tensor([[[0.0, 1.0]]]).expand(3, 1, 2))
    stereo = torch.tensor([[[0.0]], [[1.0]]])
    torch.testing.assert_close(as_rgb(stereo)[0], torch.tensor([[0.0, 1.0]]))
    color = torch.rand(3, 2, 2)
    torch.testing.assert_close(as_rgb(color), color)


def test_as_rgb_rescales_values_outside_0_1() -> None:
    image = as_rgb(torch.tensor([[[-2.0, 0.0, 2.0]]]))
    torch.testing.assert_close(image[0, 0], torch.tensor([0.0, 0.5, 1.0]))


def test_overlay_shows_both_images() -> None:
    first, second = torch.tensor([[[1.0, 0.0, 1.0]]]), torch.tensor([[[0.0, 1.0, 1.0]]])
    overlay = overlay_two_colors(first, second)[:, 0]
    assert overlay.shape == (3, 3)
    red, blue = overlay[0], overlay[2]
    assert float(red[0]) > float(blue[0])  # orange
    assert float(red[1]) < float(blue[1])  # blue
    assert float(overlay.max()) <= 1
    torch.testing.assert_close(overlay_two_colors((255 * first).byte(), (255 * second).byte())[:, 0], overlay)


def test_unwritable_figure_raises_the_given_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyError, match=r"figure\.png"):
        save_figure(new_figure(1, 1), tmp_path / "file" / "figure.png", KeyError)
