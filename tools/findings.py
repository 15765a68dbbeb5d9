"""Stamps that detect findings whose numbers have changed.

    python -m tools.findings                 # list outdated findings
    python -m tools.findings --stamp NAME... # update the stamps of findings that were checked against their tables
    python -m tools.findings --scale long    # those of another scale than cpu

Findings are observations from the records, written by hand in ``results/papers/SCALE/findings``; verdicts on claims are
computed and are not repeated there. Each file ends with a stamp, a hash of the table that it refers to; a test fails if
the table has changed.
"""

import argparse
import hashlib
import re
import sys

from torchcaps.papers import list_papers
from torchcaps.reproduce.render import render_item
from torchcaps.reproduce.report import FINDINGS_DIRECTORY, PROVENANCE_FILE, REMARKS_FILE
from torchcaps.reproduce.scales import SCALES
from torchcaps.reproduce.store import RecordStore

STAMP = re.compile(r"\n<!-- stamp: (\w+) -->\n$")


def current_stamps(store: RecordStore) -> dict[str, str]:
    """Return the stamp of each item's table."""
    return {
        f"{paper.name}-{item.name}": _hash(render_item(paper, item, store))
        for paper in list_papers()
        for item in paper.items
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stale(store: RecordStore) -> list[str]:
    """Return the names of findings without the current stamp."""
    current = current_stamps(store)
    paths = sorted((store.results / FINDINGS_DIRECTORY).glob("*.md"))
    paths = [path for path in paths if path.name not in (REMARKS_FILE, PROVENANCE_FILE)]  # about no table
    stamps = {path.stem: STAMP.search(path.read_text(encoding="utf-8")) for path in paths}
    return [name for name, match in stamps.items() if match is None or match[1] != current.get(name)]


def stamp(store: RecordStore, name: str) -> None:
    """Write the current stamp into a findings file."""
    path = store.results / FINDINGS_DIRECTORY / f"{name}.md"
    text = STAMP.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    path.write_text(f"{text}\n\n<!-- stamp: {current_stamps(store)[name]} -->\n", encoding="utf-8")


def main() -> None:
    """List outdated findings, after updating the stamps of some."""
    parser = argparse.ArgumentParser(description="List findings whose numbers have changed since they were stamped.")
    parser.add_argument("--stamp", nargs="+", default=[], metavar="NAME", help="update the stamps of these findings")
    parser.add_argument("--scale", default="cpu", choices=SCALES, help="scale of the records (default: cpu)")
    arguments = parser.parse_args()
    store = RecordStore(arguments.scale)
    for name in arguments.stamp:
        if not (store.results / FINDINGS_DIRECTORY / f"{name}.md").exists():
            sys.exit(f"{store.results / FINDINGS_DIRECTORY} has no finding {name!r}")
        stamp(store, name)
    for name in stale(store):
        print(name)


if __name__ == "__main__":
    main()
