# %%
# # Reproduce one cell of a table
#
# One number of Sabour 2017, Table 1: the error of CapsNet on MNIST with three routing iterations and
# reconstruction, published as 0.25 %. At the scale `smoke` everything runs in seconds and the number is
# meaningless; change `SCALE` to `cpu` for a result (about an hour on two cores).

import json
import sys
from pathlib import Path

from torchcaps.cli import main
from torchcaps.papers import find_item

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "tutorial-output")
SCALE = "smoke"

# %%
# ## The published numbers
#
# Every table of the papers is a literal with the published numbers and the source of ours.

paper, item = find_item("sabour2017", "table1")
print(item.title)
for row in item.rows:
    print("  ", row.label, {column: cell.published for column, cell in row.cells.items()})

# %%
# ## Run one row
#
# `--rows` selects rows, `--columns` columns; the command prints an estimate of time and memory first. If it is
# stopped, the same command continues.

arguments = ["reproduce", "sabour2017", "table1", "--scale", SCALE, "--rows", "3 iterations, reconstruction"]
main(
    [
        *arguments,
        "--columns",
        "MNIST",
        "--num-threads",
        "1",
        "--work",
        str(OUT / "work"),
        "--results",
        str(OUT / "records"),
    ]
)

# %%
# ## The record
#
# A record has the configuration, seed, learning curve, time, machine and command. `torchcaps report` makes the page
# of all [results](../results.md) from them.

records = sorted((OUT / "records").rglob("*.json"))
for path in records:
    record = json.loads(path.read_text())
    print(path.name, sorted(record)[:8])
assert records
