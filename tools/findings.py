"""Which findings were written of numbers that have changed since, and a stamp on those that were read again.

    python -m tools.findings                 # list them
    python -m tools.findings --stamp NAME... # they say what the numbers say now: stamp them

What we make of the papers' records is written by hand, in ``results/papers/cpu/findings``. Every file ends with a stamp
of the table that it was written of, and a test fails where the table is another one now.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

from torchcaps.papers import list_papers
from torchcaps.reproduce.markdown import item_text
from torchcaps.reproduce.render import FINDINGS
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import Store

STAMP = re.compile(r"\n<!-- written of (\w+) -->\n$")


def numbers(store: Store) -> dict[str, str]:
    """Return a stamp for every item's table, and for all verdicts together, which the summary is about."""
    found, verdicts = {}, []
    for paper in list_papers():
        for item in paper.items:
            found[f"{paper.name}-{item.name}"] = _stamp(item_text(paper, item, store))
            verdicts += [str(verdict) for verdict in Results(item, store).verdicts()]
    return {**found, "summary": _stamp("\n".join(verdicts))}


def _stamp(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stale(store: Store) -> list[str]:
    """Return the findings whose numbers have changed since they were written."""
    now = numbers(store)
    paths = sorted((store.results / FINDINGS).glob("*.md"))
    told = {path.stem: STAMP.search(path.read_text(encoding="utf-8")) for path in paths}
    return [name for name, match in told.items() if match is None or match[1] != now.get(name)]


def stamp(store: Store, name: str) -> None:
    """Write the stamp of the numbers as they are."""
    path = store.results / FINDINGS / f"{name}.md"
    text = STAMP.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    path.write_text(f"{text}\n\n<!-- written of {numbers(store)[name]} -->\n", encoding="utf-8")


def main() -> None:
    """List what is stale, or stamp what was read again."""
    parser = argparse.ArgumentParser(description="Which findings were written of numbers that have changed since.")
    parser.add_argument("--stamp", nargs="+", default=[], metavar="NAME", help="these say what the numbers say now")
    store = Store("cpu")
    for name in parser.parse_args().stamp:
        if not (store.results / FINDINGS / f"{name}.md").exists():
            sys.exit(f"there is no finding {name!r} in {store.results / FINDINGS}")
        stamp(store, Path(name).stem)
    for name in stale(store):
        print(name)


if __name__ == "__main__":
    main()
