"""The equations of a routing, from its docstring."""

import inspect
import re
import textwrap

__all__ = ["routing_equation"]

BLOCK = re.compile(r"::\n\n((?:[ \t]+\S.*\n|\n)+)")
INLINE = re.compile(r"``([^`]*=[^`]*)``")


def routing_equation(routing: type) -> list[str]:
    """Return the lines of mathematics in the docstring of a routing: its indented blocks, or inline equations.

    >>> from torchcaps.routing import Dynamic
    >>> any("softmax" in line for line in routing_equation(Dynamic))
    True
    """
    text = inspect.getdoc(routing) or ""
    lines: list[str] = []
    for block in BLOCK.findall(text.partition("\nArgs:")[0] + "\n"):
        lines += [line.rstrip() for line in textwrap.dedent(block).splitlines() if line.strip()]
    if not lines:
        lines = [match.strip() for match in INLINE.findall(text.partition("\nArgs:")[0])]
    return lines
