"""Pages of the reference, generated from docstrings, the parsers of the command line and the settings of a run."""

import contextlib
import importlib
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "docs/reference/public_names.txt"
# Packages in the order of the navigation, with the title of their page.
PACKAGES = {
    "torchcaps": "The package",
    "torchcaps.nn": "Layers",
    "torchcaps.routing": "Routings",
    "torchcaps.losses": "Losses",
    "torchcaps.metrics": "Metrics",
    "torchcaps.functional": "Functions",
    "torchcaps.votes": "Votes",
    "torchcaps.models": "Models",
    "torchcaps.data": "Data sets",
    "torchcaps.training": "Training",
    "torchcaps.analysis": "Analyses",
    "torchcaps.audit": "Audit",
    "torchcaps.export": "Export",
    "torchcaps.explorer": "Explorer",
    "torchcaps.profiling": "Profiling",
    "torchcaps.bench": "Benchmarks",
    "torchcaps.papers": "Papers",
    "torchcaps.lightning": "Lightning",
    "torchcaps.hub": "Hugging Face Hub",
}


def public_names(package: str) -> list[str]:
    """Return the public names of a package: its ``__all__``, without modules."""
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]


def inventory() -> list[str]:
    """Return every public name of the library with its package, one line each."""
    return [f"{package}.{name}" for package in PACKAGES for name in sorted(public_names(package))]


def page_of(package: str) -> str:
    """Return the path of the page of a package."""
    return f"reference/api/{package.rpartition('.')[2]}.md"


def package_page(package: str, title: str) -> str:
    """Return the Markdown of a package's page: its docstring and every public name."""
    module = importlib.import_module(package)
    parts = [f"# {title}: `{package}`", summary_of(module)]
    for name in public_names(package):
        value = getattr(module, name)
        owner = getattr(value, "__module__", None) if callable(value) else None
        home = next((p for p in PACKAGES if p != "torchcaps" and (owner or "").startswith(p)), package)
        if package == "torchcaps" and home != package and name in public_names(home):
            parts.append(f"## `torchcaps.{name}`\n\nSee [`{home}.{name}`]({Path(page_of(home)).name}#{home}.{name}).")
        elif isinstance(value, str):
            parts.append(f"## `{package}.{name}`\n\n`{value!r}`" if name != "__version__" else "")
        else:
            parts.append(f"::: {package}.{name}")
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_of(module: ModuleType) -> str:
    """Return the docstring of a module, its examples as a code block."""
    text = (module.__doc__ or "").strip()
    return re.sub(
        r"((?:^(?:>>>|\.\.\.).*\n?(?:^(?!>>>|\.\.\.)\S.*\n?)*)+)", r"```pycon\n\1\n```\n", text, flags=re.MULTILINE
    )


# Command line ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal_width(columns: int) -> Any:
    """Set the width to which the help of commands is wrapped."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def commands_page() -> str:
    """Return the Markdown of the help of every command."""
    from torchcaps.cli.completion import command_parsers
    from torchcaps.cli.main import HELP

    parts = ["# Commands", "As `torchcaps COMMAND --help` prints them.", f"```text\n{HELP.strip()}\n```"]
    with terminal_width(100):
        for names, parser in command_parsers().items():
            text = parser.format_help().strip()
            parts.append(f"## torchcaps {' '.join(names)}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


# Configuration --------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Return the Markdown table of every key of ``config.yaml``."""
    from torchcaps._core.serialize import is_identity, is_resumable
    from torchcaps.cli.completion import command_parsers
    from torchcaps.models import LossConfig, OptimizerConfig, Recipe
    from torchcaps.training import RunSpec
    from torchcaps.training.config import _owner

    spec = RunSpec.of()
    help_of = {a.dest: " ".join((a.help or "").split()) for a in command_parsers()[("train",)]._actions}
    parts = [
        "# Configuration keys",
        "Every key of a run's `config.yaml`, which is a valid `--config` of the next run. Each key is also a flag of "
        "`torchcaps train`, with `-` instead of `_`, and an argument of `torchcaps.fit`. The defaults are those of "
        "`capsnet_digits`; another model has those of its paper. *Resume*: the key may change when a run is resumed. "
        "*Identity*: the key is part of the identity of a record, so that runs with different values are not averaged.",
    ]
    rows = ["| key | default | resume | identity | description |", "|---|---|---|---|---|"]
    for key, value in spec.to_plain().items():
        owner = _owner(key)
        shown = (
            f"`{type(getattr(spec.recipe, key, value)).__name__}`, see below"
            if isinstance(value, dict) and value
            else f"`{value!r}`"
        )
        flags = ["yes" if test(owner, key) else "no" for test in (is_resumable, is_identity)]
        text = help_of.get(key) or describe(owner, key)
        rows.append(f"| `{key}` | {shown} | {flags[0]} | {flags[1]} | {cell(text)} |")
    parts.append("\n".join(rows))
    for title, cls, value in (
        ("loss", LossConfig, spec.recipe.loss),
        ("optimizer", OptimizerConfig, spec.recipe.optimizer),
        ("lr_schedule", type(spec.recipe.lr_schedule), spec.recipe.lr_schedule),
    ):
        rows = [f"| key of `{title}` | default | description |", "|---|---|---|"]
        for name in cls.__dataclass_fields__:
            rows.append(f"| `{name}` | `{getattr(value, name)!r}` | {cell(describe(cls, name))} |")
        parts.append(f"## {title}\n\n`{cls.__name__}`\n\n" + "\n".join(rows))
    assert set(spec.to_plain()) >= set(Recipe.__dataclass_fields__)
    parts.append(
        "## Fields of the model, of the data set and of the routing\n\n"
        "`model_options`, `data_options` and `test_options` hold the fields of the chosen model and data set; "
        "`torchcaps train MODEL --help` lists them. A routing is written as `class_path` and `init_args`; its fields "
        "are in the [reference](api/routing.md)."
    )
    return "\n\n".join(parts) + "\n"


def describe(cls: type, field: str) -> str:
    """Return the description of a field in the section ``Args`` of a docstring, of the class or of a base class."""
    for owner in cls.__mro__:
        text = inspect.cleandoc(owner.__doc__ or "")
        match = re.search(rf"^ {{4}}(?:\w+, )*{field}(?:, \w+)*: (.*(?:\n {{8,}}.*)*)", text, re.MULTILINE)
        if match:
            return " ".join(match[1].split())
    return ""


def cell(text: str) -> str:
    """Return text for a cell of a table, with code in single backticks."""
    return text.replace("``", "`").replace("|", "\\|")


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the site."""
    pages = {page_of(package): package_page(package, title) for package, title in PACKAGES.items()}
    return {**pages, "reference/commands.md": commands_page(), "reference/configuration.md": configuration_page()}


if __name__ == "__main__":
    INVENTORY.parent.mkdir(parents=True, exist_ok=True)
    INVENTORY.write_text("\n".join(inventory()) + "\n")
    print(f"{INVENTORY.relative_to(ROOT)}: {len(inventory())} names")
