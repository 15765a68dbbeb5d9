"""The command line in tests: what it prints, and how it refuses."""

import contextlib
import io

import pytest

from torchcaps.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints."""
    main(list(words))
    return capsys.readouterr().out


def refusal(*words: str) -> str:
    """Return the one sentence on standard error with which a command refuses; it ends with 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2, said.getvalue()
    assert said.getvalue().count("\n") == 1, said.getvalue()
    return said.getvalue().strip()
