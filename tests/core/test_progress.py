"""Progress bars; standard error is not a terminal in these tests unless patched."""

import io
import sys

import pytest

from torchcaps._core import progress
from torchcaps._core.progress import DownloadBar, track


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_track_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(1000), "reading")) == list(range(1000))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("n", "drawn"), [(3, False), (progress.MIN_ITEMS_FOR_BAR, True)])
def test_track_draws_a_bar_on_a_terminal_for_many_items(n: int, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(iter(range(n)), "reading", total=n)) == list(range(n))
    assert ("reading" in terminal.getvalue()) == drawn


def test_download_bar_prints_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with DownloadBar("mnist.gz") as bar:
        bar.total = 10
        bar.update(10)
        bar.reset()
        bar.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "mnist.gz" in err
    assert err.count("\n") == 1


def test_download_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with DownloadBar("mnist.gz") as bar:
        bar.total = 2_000
        bar.update(2_000)
    assert "mnist.gz" in terminal.getvalue()
