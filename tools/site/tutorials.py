"""Pages of the tutorials: the scripts of examples/ as text and code, with the pictures that they wrote."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def scripts() -> list[Path]:
    """Return the tutorials in order."""
    return sorted(EXAMPLES.glob("[0-9]*.py"))


def page(script: Path) -> str:
    """Return a script as Markdown: comments that start with ``# %%`` are text, everything else is code."""
    parts = []
    for block in re.split(r"^# %%\n", script.read_text(), flags=re.MULTILINE):
        lines = block.split("\n")
        n_text = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:n_text])
        code = "\n".join(lines[n_text:]).strip("\n")
        if text:
            parts.append(text)
        if code:
            parts.append(f"```python\n{code}\n```")
    source = f"Run it: `python examples/{script.name}`; source: [{script.name}](../../examples/{script.name})."
    return "\n\n".join([*parts, source]) + "\n"


def pages() -> dict[str, str]:
    """Return the Markdown of each tutorial by its path in the site."""
    return {f"tutorials/{script.stem}.md": page(script) for script in scripts()}
