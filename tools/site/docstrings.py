"""Griffe extension: reStructuredText that our docstrings use, as Markdown."""

import re
from typing import Any

import griffe

RULE = r"^[ ]*={2,}(?:[ ]+={2,})+[ ]*$"
TABLE = re.compile(rf"{RULE}(?:\n.*)*?\n{RULE}(?:\n.*)*?\n{RULE}", re.MULTILINE)  # header and body
EXAMPLE = re.compile(r"^[ ]*>>> .*\n?(?:^(?![ ]*$).*\n?)*", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Convert literal blocks, tables and code in double backticks."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        """Replace the text of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring with Markdown instead of reStructuredText."""
    text = TABLE.sub(lambda match: f"```text\n{match[0]}\n```", text)
    text = EXAMPLE.sub(lambda match: "```pycon\n" + match[0].rstrip("\n") + "\n```\n", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
