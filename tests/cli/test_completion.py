"""``torchcaps completion``, and what holds for the parsers of all commands."""

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.cli.commands import run_command, usage_error
from torchcaps.cli.command_line import NO_VALUE
from torchcaps.cli.completion import ZSH_EVAL_OR_SOURCE, command_parsers
from torchcaps.cli.main import COMMANDS
from torchcaps.cli.synonyms import SYNONYMS


def test_bash_completes_commands_flags_models_and_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = run_command(capsys, "completion", "bash")
    (tmp_path / "torchcaps.bash").write_text(script)
    cases = {
        "torchcaps tr": "train",
        "torchcaps train --ep": "--epochs",
        "torchcaps train capsnet_s": "capsnet_small",
        "torchcaps train --device cu": "cuda",
        "torchcaps train --routing inv": "inverted_attention",
        "torchcaps train --data dig": "digits",
        "torchcaps analyze perturb": "perturbation",
        "torchcaps reproduce sab": "sabour2017",
        "torchcaps data get mn": "mnist",
        "torchcaps show tsai2020_em": "tsai2020_em_cifar10",
        "torchcaps completion f": "fish",
    }
    driver = textwrap.dedent("""
        source torchcaps.bash
        function=$(complete -p torchcaps | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        while read -r line; do
          read -ra COMP_WORDS <<< "$line"
          COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
          $function
          echo "${COMPREPLY[*]}"
        done
    """)
    command = ["bash", "-c", driver]
    lines = "\n".join(cases) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=tmp_path)
    replies = done.stdout.splitlines()
    assert len(replies) == len(cases), done.stderr
    assert {
        line: reply.split() for line, reply in zip(cases, replies, strict=True) if cases[line] not in reply.split()
    } == {}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_have_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = run_command(capsys, "completion", shell)
    for name in (*COMMANDS, "capsnet_small", "perturbation", "max-minutes"):
        assert name in script, name
    assert shell != "zsh" or ZSH_EVAL_OR_SOURCE in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0


def test_unknown_shell() -> None:
    assert "bash" in usage_error("completion", "tcsh2")


def test_flags_without_value_are_known_before_the_parser_is_built() -> None:
    """Otherwise they would consume the next argument."""
    for names, parser in command_parsers().items():
        no_value = {flag for flag, action in parser.flags.items() if action.nargs == 0}
        assert no_value <= NO_VALUE, names


def test_every_command_has_examples_one_per_line() -> None:
    for names, parser in command_parsers().items():
        if names != ("data",):
            lines = parser.format_help().partition("\nexamples:\n")[2].splitlines()
            assert lines, names
            assert all(" ".join(names) in line for line in lines if line.startswith("  torchcaps")), names
            assert "Example: " not in parser.format_help()


def test_synonyms_are_not_flags_themselves() -> None:
    parsers = command_parsers()
    known = {flag for parser in parsers.values() for flag in parser.flags}
    for flag, names in SYNONYMS.items():
        assert flag.partition(" ")[0] in known, flag
        clashes = {f"--{name}" for name in names} & set(parsers[("train",)].flags)
        assert clashes == set(), flag


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("foo", [repr(name) for name in COMMANDS]),
        ("train --learning-rate 1", ["did you mean --lr?"]),
        ("evaluate run --batch 3", ["--batch"]),
        ("analyze run pertubation", ["'pertubation'", "did you mean perturbation"]),
        ("reproduce saber2017", ["'saber2017'", "'sabour2017'"]),
        ("reproduce sabour2017 tabel1", ["'tabel1'", "did you mean table1"]),
        ("data get mnits", ["'mnits'", "'mnist'"]),
        ("show capsnet_smal", ["'capsnet_smal'", "'capsnet_small'"]),
        ("bench dynamic-ful", ["'dynamic-ful'", "'dynamic-full'"]),
        ("predict run x.png --csv --json", ["--csv", "--json"]),
        ("train --device cuda --devices 2", ["--device cuda"]),
    ],
)
def test_usage_errors_suggest_what_was_meant(arguments: str, parts: list[str]) -> None:
    message = usage_error(*arguments.split())
    assert [part for part in parts if part not in message] == [], message


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "-V") == run_command(capsys, "--version")
