"""``torchcaps completion``: a script that completes commands, flags and names in bash, zsh or fish."""

import argparse
import importlib
import inspect
import typing
from typing import Any, Literal

from torchcaps._core.optional import import_optional
from torchcaps.analysis import ANALYSES
from torchcaps.cli.parser import Parser, ParserRequest, requesting_parser
from torchcaps.cli.values import class_choices, flag_annotation, union_members
from torchcaps.data import list_datasets, list_pipelines
from torchcaps.models import list_models
from torchcaps.models.schedules import LRSchedule
from torchcaps.papers import list_papers
from torchcaps.routing import Routing

__all__ = ["command_parsers", "completion_command", "completion_script"]

Shell = Literal["bash", "zsh", "fish"]
DESCRIPTION = (
    "Print a script that completes commands, flags, models, data sets, analyses and papers. Load it in the start-up "
    "file of the shell, or install it where the shell looks for completions."
)
EXAMPLES = (
    'eval "$(torchcaps completion bash)"    # in ~/.bashrc',
    'eval "$(torchcaps completion zsh)"     # in ~/.zshrc, after compinit',
    "torchcaps completion fish > ~/.config/fish/completions/torchcaps.fish",
)
SUBCOMMANDS = {"data": ("list", "get", "check", "sample")}
DIRECTORY_FLAGS = ("--data-dir", "--resume", "--work", "--results", "--source")
FILE_FLAGS = ("--config", "--export", "--out", "--figure")
# Functions that complete names from a list together with directories, by shell.
PREAMBLE = {
    "bash": '_torchcaps_{key}() {{\n  compgen -W "{names}" -- "$1"\n  compgen -d -- "$1"\n}}\n',
    "zsh": "_torchcaps_{key}() {{\n  _alternative 'names:name:({names})' 'directories:directory:_files -/'\n}}\n",
    "fish": "",
}
# shtab registers the function under eval only, and would call it, which fails, if a file with the script is sourced.
ZSH_EVAL, ZSH_EVAL_OR_SOURCE = "$zsh_eval_context[-1] == eval ", "$zsh_eval_context[-1] == (eval|file) "


def completion_command(arguments: list[str]) -> None:
    """Print the completion script of a shell."""
    parser = Parser("torchcaps completion", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("shell", choices=typing.get_args(Shell), help="the shell: bash, zsh or fish")
    options, _ = parser.parse(arguments)
    print(completion_script(options.shell))


def completion_script(shell: Shell) -> str:
    """Return the completion script of a shell."""
    shtab = import_optional("shtab", "torchcaps completion")
    root = argparse.ArgumentParser("torchcaps", add_help=False)
    root.add_argument("-h", "--help", action="help", help="show the commands")
    root.add_argument("-V", "--version", action="version", version="", help="print the version")
    commands = root.add_subparsers()
    groups: dict[str, Any] = {}
    for names, parser in command_parsers().items():
        command, *subcommand = names
        owner = commands
        if subcommand:
            owner = groups[command]
        copied = owner.add_parser(names[-1], help=_first_sentence(parser.description), add_help=False)
        if command in SUBCOMMANDS and not subcommand:
            groups[command] = copied.add_subparsers()
        else:
            _copy_arguments(parser, copied, names)
    names = {"models": list_models(), "datasets": list_datasets(), "analyses": list(ANALYSES)}
    texts = [PREAMBLE[shell].format(key=key, names=" ".join(values)) for key, values in names.items()]
    script = shtab.complete(root, shell, preamble="".join(texts))
    return script.replace(ZSH_EVAL, ZSH_EVAL_OR_SOURCE)


def command_parsers() -> dict[tuple[str, ...], Parser]:
    """Return the parser of each command and subcommand, by its names."""
    from torchcaps.cli.main import COMMANDS

    parsers: dict[tuple[str, ...], Parser] = {}
    for command, (module, function) in COMMANDS.items():
        run = getattr(importlib.import_module(module), function)
        for subcommand in ("", *SUBCOMMANDS.get(command, ())):
            names = (command, subcommand) if subcommand else (command,)
            if command == "data" and not subcommand:
                parsers[names] = Parser("torchcaps data", inspect.getdoc(run))
                continue
            try:
                with requesting_parser():
                    run([subcommand] if subcommand else [])
            except ParserRequest as request:
                parsers[names] = request.parser
    return parsers


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


def _copy_arguments(parser: Parser, copied: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Copy the arguments of a command to a parser of argparse, with the values that the shell completes."""
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        options: dict[str, Any] = {"help": (action.help or "").replace("%", "%%")}
        if action.option_strings:
            if action.nargs == 0 or action.option_strings[-1].endswith("help"):
                options["action"] = "store_true"
            new = copied.add_argument(*action.option_strings, dest=action.dest.replace(".", "_"), **options)
        else:
            new = copied.add_argument(action.dest, nargs=action.nargs, **options)
        complete, choices = _completion(action, names)
        if complete is not None:
            new.complete = complete  # type: ignore[attr-defined]
        elif choices and action.nargs != 0:
            new.choices = choices


def _completion(action: argparse.Action, names: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Return the function that completes an argument, or the values that it accepts."""
    shtab = import_optional("shtab", "torchcaps completion")
    flag = action.option_strings[-1] if action.option_strings else ""
    if flag in ("--data", "--test-data") or (names[0] == "data" and action.dest == "name"):
        return _names_or_directories("datasets", list_datasets()), []
    if not flag and names == ("train",):
        return _names_or_directories("models", list_models()), []
    if not flag and names == ("analyze",):
        return _names_or_directories("analyses", list(ANALYSES)), []
    if names[0] in ("evaluate", "predict") and action.dest in ("run", "runs"):
        return shtab.FILE, []  # a run directory or an ONNX file
    if flag in DIRECTORY_FLAGS or (not flag and action.dest in ("run", "runs")):
        return shtab.DIRECTORY, []
    if flag in FILE_FLAGS or (not flag and action.dest == "images"):
        return shtab.FILE, []
    by_name = {
        "--model": list_models,
        "--augmentation": list_pipelines,
        "paper": lambda: [*(paper.name for paper in list_papers()), "queue", "status"],
        "item": lambda: sorted({item.name for paper in list_papers() for item in paper.items} | {"all"}),
    }
    if names == ("show",) and not flag:
        return None, list_models()
    if flag in by_name or (not flag and action.dest in by_name):
        return None, list(by_name[flag or action.dest]())
    annotation = flag_annotation(action)
    if annotation in (Routing, LRSchedule):
        return None, list(class_choices(annotation))
    values = [
        v for option in union_members(annotation) if typing.get_origin(option) is Literal for v in option.__args__
    ]
    if annotation is bool:
        values = [True, False]
    values += list(action.choices or ())
    return None, [str(value).lower() if isinstance(value, bool) else str(value) for value in values]


def _names_or_directories(key: str, names: list[str]) -> dict[str, str]:
    """Return the functions of each shell that complete one of the names, or a directory."""
    fish = f"{' '.join(names)} (__fish_complete_directories)"
    return {"bash": f"_torchcaps_{key}", "zsh": f"_torchcaps_{key}", "fish": fish}
