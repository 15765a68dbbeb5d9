"""Run commands of the command line in tests."""

import contextlib
import io

import pytest

from torchcaps.cli import main
from torchcaps.cli.console import ExitCode

__all__ = ["failure", "run_command", "usage_error"]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the standard output of a command."""
    main(list(arguments))
    return capsys.readouterr().out


def usage_error(*arguments: str) -> str:
    """Return the error message of a command that must exit with `ExitCode.USAGE` and print exactly one line."""
    return _error(ExitCode.USAGE, *arguments)


def failure(*arguments: str) -> str:
    """Return the error message of a command that must exit with `ExitCode.FAILURE` and print exactly one line."""
    return _error(ExitCode.FAILURE, *arguments)


def _error(code: ExitCode, *arguments: str) -> str:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == code, stderr.getvalue()
    assert stderr.getvalue().count("\n") == 1, stderr.getvalue()
    return stderr.getvalue().strip()
