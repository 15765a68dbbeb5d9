"""Draw the layers of the package from its real imports: docs/images/architecture.svg.

    python tools/import_graph.py

Each row is one layer; a package imports packages of rows below it only. An import that a longer path of imports implies
is not drawn. ``tests/test_docs.py`` compares the file with the present imports.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchcaps"
OUT = ROOT / "docs/images/architecture.svg"
# Packages by layer, the lowest first; tests/test_structure.py enforces the order.
ROWS = [
    ["_core"],
    ["functional"],
    ["capsules"],
    ["votes"],
    ["routing"],
    ["losses", "nn", "metrics"],
    ["data", "models"],
    ["profiling"],
    ["analysis"],
    ["training"],
    ["bench", "export", "audit", "lightning", "hub"],
    ["reproduce"],
    ["papers"],
    ["explorer"],
    ["cli"],
]
WIDTH, ROW_HEIGHT, BOX = 860, 62, (128, 30)


def import_graph() -> dict[str, set[str]]:
    """Return the packages that each package of torchcaps imports, anywhere in its source."""
    graph: dict[str, set[str]] = {name: set() for row in ROWS for name in row}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package not in graph:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in names):
                if parts[0] == "torchcaps" and len(parts) > 1 and parts[1] in graph and parts[1] != package:
                    graph[package].add(parts[1])
    return graph


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without edges that a longer path implies."""

    def reachable(name: str) -> set[str]:
        found: set[str] = set()
        stack = list(graph[name])
        while stack:
            if (other := stack.pop()) not in found:
                found.add(other)
                stack += graph[other]
        return found

    below = {name: reachable(name) for name in graph}
    return {name: {o for o in others if not any(o in below[x] for x in others)} for name, others in graph.items()}


def render() -> str:
    """Return the diagram as SVG."""
    centre = {}
    for level, row in enumerate(reversed(ROWS)):
        for column, name in enumerate(row):
            centre[name] = (WIDTH * (2 * column + 1) / (2 * len(row)), ROW_HEIGHT * (level + 0.5))
    width, height = BOX
    lines, boxes = [], []
    for name, others in sorted(reduced(import_graph()).items()):
        x, y = centre[name]
        for other in sorted(others):
            to_x, to_y = centre[other]
            lines.append(f'<path d="M{x:g} {y + height / 2:g} L{to_x:g} {to_y - height / 2:g}"/>')
        boxes.append(
            f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="5"/>'
            f'<text x="{x:g}" y="{y + 4.5:g}">{name}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW_HEIGHT * len(ROWS)}" role="img">',
            "<title>Imports between the packages of torchcaps</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            '<g stroke="#8a8a8a" stroke-width="1.2" fill="none">',
            *lines,
            "</g>",
            '<g fill="#e8f1f8" stroke="#0072B2" font-family="monospace" font-size="13" text-anchor="middle">',
            *[box.replace("<text ", '<text fill="#111" stroke="none" ') for box in boxes],
            "</g>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    OUT.write_text(render())
    print(OUT.relative_to(ROOT))
