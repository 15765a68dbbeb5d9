"""Write the weights of a run to the package as pretrained weights, with a model card: ``tools/pretrained.py RUN``."""

import argparse
import json
import sys
from pathlib import Path

from torchcaps.models.pretrained import DIRECTORY, save_pretrained
from torchcaps.training import load_run

CARD = """---
license: apache-2.0
library_name: torchcaps
tags: [capsule-network, image-classification]
datasets: [{data}]
---

# {model}

{n_parameters:,} parameters. Load with `torchcaps.create_model("{model}", pretrained=True)`; no download.

| | |
|---|---|
| data | {data}{options}; {n_test:,} test images |
| input | pixels after the test transforms of the pipeline `{augmentation}`: {transforms} |
| recipe | {recipe} |
| weights | {weights}, after {epochs:g} epochs ({steps:,} steps); nothing was selected on the test set |
| test accuracy | {accuracy:.2%}, 95 % interval {low:.2%} to {high:.2%} (seed {seed}) |
| training time | {minutes:.0f} minutes |
| licence | Apache 2.0 |

Trained by

```
{command}
```
"""


def make_card(run: Path, command: str) -> str:
    """Return the model card of a run that was started by a command."""
    trained = load_run(run)
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    test, spec, recipe = results["test"]["last"], trained.spec, trained.spec.recipe
    options = "".join(f", {name}={value}" for name, value in spec.data_options.items())
    parts = [recipe.optimizer, recipe.lr_schedule, recipe.loss]
    return CARD.format(
        model=results["model"],
        n_parameters=trained.model.n_parameters,
        data=results["data"],
        options=options,
        n_test=test["n"],
        recipe=f"{'; '.join(map(str, parts))}; batch size {recipe.batch_size}; augmentation {recipe.augmentation}",
        augmentation=recipe.augmentation,
        transforms=", ".join(map(str, trained.pipeline.test)),
        weights=results["eval_weights"],
        epochs=results["epochs"],
        steps=results["steps"],
        accuracy=test["accuracy"],
        low=test["interval"][0],
        high=test["interval"][1],
        seed=results["seed"],
        minutes=results["seconds"] / 60,
        command=command,
    )


def main(arguments: list[str]) -> None:
    """Write weights and card of the run in ``arguments``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--command", required=True, help="command line that started the run, for the model card")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="output directory (default: the package)")
    options = parser.parse_args(arguments)
    card = make_card(options.run, options.command)
    for path in save_pretrained(load_run(options.run).model, card, options.directory):
        sys.stdout.write(f"{path} ({path.stat().st_size:,} bytes)\n")


if __name__ == "__main__":
    main(sys.argv[1:])
