"""Command-line parser: splitting, values, classes by name, help texts."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from torchcaps import cli
from torchcaps.cli.command_line import NO_VALUE, TRUST_FLAG, CommandLine, flag_of, settings_flags
from torchcaps.cli.console import ExitCode
from torchcaps.cli.parser import Parser, add_fields, field_help
from torchcaps.models.schedules import Exponential, LRSchedule, OneCycle
from torchcaps.routing import EM, Dynamic, Routing


def test_flags_without_a_value_are_declared() -> None:
    """Otherwise the argument behind such a flag would be taken for its value."""
    declared = set()
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                actions = [keyword.value for keyword in node.keywords if keyword.arg == "action"]
                if any(isinstance(action, ast.Constant) and action.value == "store_true" for action in actions):
                    declared |= {TRUST_FLAG if isinstance(a, ast.Name) else ast.literal_eval(a) for a in node.args}
    assert TRUST_FLAG in declared
    assert declared - NO_VALUE == set()


@pytest.mark.parametrize(
    ("arguments", "positionals", "flags"),
    [
        ("a --x 1 b", ["a", "b"], [("--x", "1")]),
        ("--x=1 --y= a", ["a"], [("--x", "1"), ("--y", "")]),
        ("--batch_size 3", [], [("--batch-size", "3")]),
        ("--on a", ["a"], [("--on", "true")]),
        ("--on false a", ["a"], [("--on", "false")]),
        ("--on TRUE", [], [("--on", "TRUE")]),
        ("a --json b", ["a", "b"], [("--json", None)]),
        ("--x", [], [("--x", None)]),
        ("--on", [], [("--on", "true")]),
        ("--x -1", [], [("--x", "-1")]),
        ("--a.b_c d", [], [("--a.b-c", "d")]),
        ("--x --y 1", [], [("--x", None), ("--y", "1")]),
        ("-q a -1", ["a", "-1"], [("--quiet", None)]),
    ],
)
def test_split(arguments: str, positionals: list[str], flags: list[tuple[str, str | None]]) -> None:
    line = CommandLine.split(arguments.split(), {"--on"})
    assert (line.positionals, line.flags) == (positionals, flags)


def test_the_last_value_of_a_flag_counts() -> None:
    line = CommandLine.split(["--x", "1", "--x=2", "--y", "3"])
    assert (line.get("--x"), line.get("--y"), line.get("--z")) == ("2", "3", None)
    assert ("--x" in line, "--z" in line) == (True, False)
    assert line.without("--x").flags == [("--y", "3")]


@dataclass(frozen=True)
class Options:
    """Options of a test.

    Args:
        n_items: number of items.
        size, other: two fields with one description.
        mode: a choice
            over two lines.
        maybe: a choice or nothing.
    """

    n_items: int = 3
    size: tuple[int, int, int] = (1, 2, 3)
    other: tuple[int, ...] = (4,)
    nested: tuple[tuple[int, int], ...] = ((1, 2),)
    ratio: float | None = None
    mode: Literal["fast", "exact"] = "fast"
    streamed: Literal[True, False, "auto"] = "auto"
    is_on: bool = False
    maybe: Literal["fast", "exact"] | None = None
    name: str = ""
    routing: Routing = Dynamic()


def make_parser(line: CommandLine | None = None, prefix: str = "") -> Parser:
    parser = Parser("test", "A test.")
    parser.add_argument("items", nargs="*")
    parser.add_argument("--lr-schedule", type=LRSchedule, default=OneCycle())
    parser.add_argument("--json", action="store_true")
    add_fields(parser, Options(), prefix, line)
    return parser


def parse(*arguments: str) -> Any:
    line = CommandLine.split(list(arguments), {"--is-on"})
    parser = make_parser(line)
    return parser.instantiate(parser.parse(line)[0])


def test_defaults_are_those_of_the_dataclass() -> None:
    options = parse()
    assert {name: options[name] for name in Options.__dataclass_fields__} == Options().__dict__


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--n-items 5", "n_items", 5),
        ("--n_items=5", "n_items", 5),
        ("--size 3x64x64", "size", (3, 64, 64)),
        ("--size 3,64,64", "size", (3, 64, 64)),
        ("--size [3,64,64]", "size", (3, 64, 64)),
        ("--other 7", "other", (7,)),
        ("--other 7,8", "other", (7, 8)),
        ("--nested [[3,4],[5,6]]", "nested", ((3, 4), (5, 6))),
        ("--ratio 1e-3", "ratio", 1e-3),
        ("--ratio null", "ratio", None),
        ("--mode exact", "mode", "exact"),
        ("--streamed true", "streamed", True),
        ("--streamed False", "streamed", False),
        ("--streamed auto", "streamed", "auto"),
        ("--is-on", "is_on", True),
        ("--is-on false", "is_on", False),
        ("--name=", "name", ""),
        ("--routing em", "routing", EM()),
        ("--routing EM --routing.iterations 3", "routing", EM(3)),
        ("--routing.iterations 2 --routing.leak true", "routing", Dynamic(2, leak=True)),
        ("--routing torchcaps.routing.EM", "routing", EM()),
        ("--lr-schedule exponential --lr-schedule.period 7", "lr_schedule", Exponential(period=7)),
        ("--lr-schedule OneCycle", "lr_schedule", OneCycle()),
        ("--lr-schedule one-cycle", "lr_schedule", OneCycle()),
        ("--lr-schedule.warmup 0.5", "lr_schedule", OneCycle(warmup=0.5)),
    ],
)
def test_values(arguments: str, field: str, value: object) -> None:
    assert parse(*arguments.split())[field] == value


def test_given_flags_and_positions() -> None:
    options, given = make_parser().parse(["a", "--n_items=5", "b", "--json", "--routing.leak", "true"])
    assert options["items"] == ["a", "b"]
    assert options.json is True
    assert given == {"--n-items", "--json", "--routing.leak"}


def test_prefix_nests_the_options() -> None:
    parser = make_parser(prefix="model_options")
    options = parser.instantiate(parser.parse(["--n-items", "5", "--routing.iterations", "2"])[0])
    assert options.model_options.n_items == 5
    assert options.model_options.routing == Dynamic(2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--n-items many", ["--n-items", "int", "'many'"]),
        ("--ratio x", ["--ratio", "float", "'x'"]),
        ("--ratio nan", ["--ratio must", "finite", "'nan'"]),
        ("--ratio -inf", ["--ratio must", "finite", "'-inf'"]),
        ("--ratio 1e400", ["--ratio must", "finite", "'1e400'"]),
        ("--mode fats", ["--mode", "fast, exact", "did you mean fast", "'fats'"]),
        ("--streamed maybe", ["--streamed", "true, false, auto", "'maybe'"]),
        ("--is-on=maybe", ["--is-on", "true or false", "'maybe'"]),
        ("--size 3x64", ["--size", "3x64x64", "'3x64'"]),
        ("--other a", ["--other", "32,16", "'a'"]),
        ("--n-item 3", ["--n-item", "--n-items"]),
        ("--qq 3", ["--qq", "--n-items", "--routing"]),
        ("--routing.nothing 3", ["--routing.nothing", "--routing.leak"]),
        ("--routing em --routing.leak 1", ["--routing.leak", "--routing.iterations"]),
        ("--n-items", ["--n-items needs a value, int"]),
        ("--routing.iterations three", ["--routing.iterations must be int", "'three'"]),
        ("--routing em --routing.iterations three", ["--routing.iterations must be int", "'three'"]),
        ("--lr-schedule exponential --lr-schedule.staircase 7", ["--lr-schedule.staircase", "true or false", "'7'"]),
        ("--scheduler x", ["--scheduler", "did you mean --lr-schedule?"]),
    ],
)
def test_errors(arguments: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*arguments.split())
    message = capsys.readouterr().err
    assert stop.value.code == ExitCode.USAGE
    assert message.count("\n") == 1
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(("flag", "known"), [("--routing", "routing"), ("--lr-schedule", "schedule")])
def test_unknown_classes_are_rejected_with_the_known_ones(flag: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"{known} 'nothing': (did you mean|expected one of)"):
        parse(flag, "nothing")


def test_help_has_description_type_and_default() -> None:
    text = " ".join(make_parser().format_help().split())
    for part in (
        "--n-items N_ITEMS number of items (int; default: 3)",
        "--size [ITEM,...] two fields with one description (3 ints such as 3x64x64; default: 1,2,3)",
        "--mode {fast,exact} a choice over two lines (default: fast)",
        "--maybe MAYBE a choice or nothing (one of fast, exact)",
        "default: Dynamic(iterations=3",
        "default: OneCycle(warmup=0.3",
    ):
        assert part in text, part
    assert field_help(Options, "other") == "two fields with one description"
    assert field_help(Options, "nothing") == ""
    assert flag_of("n_items") == "--n-items"


def test_settings_as_flags() -> None:
    routing = {"class_path": "torchcaps.routing.EM", "init_args": {"iterations": 2}}
    settings = {"epochs": 3, "loss": {"reduction": "official"}, "routing": routing, "steps": None, "is_on": True}
    assert list(settings_flags(settings)) == [
        ("--epochs", "3"),
        ("--loss.reduction", "official"),
        ("--routing", '{"class_path": "torchcaps.routing.EM", "init_args": {"iterations": 2}}'),
        ("--is-on", "true"),
    ]
