"""Write the weights of a run to the package as pretrained weights, with a model card: ``tools/pretrained.py RUN``."""

import argparse
import json
import sys
from pathlib import Path

import torch

from torchcaps.analysis import reconstruct
from torchcaps.data import Dataset
from torchcaps.models.pretrained import DIRECTORY, save_pretrained
from torchcaps.training import TrainedRun, load_run
from torchcaps.training.inference import evaluate_runs
from torchcaps.training.setup import limit_images, open_test_set

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
| recipe | {recipe}; precision {precision} |
| weights | {weights}, after {epochs:g} epochs ({steps:,} steps); nothing was selected on the test set |
| test accuracy | {accuracy:.2%}, 95 % interval {low:.2%} to {high:.2%} ({n_errors} errors, seed {seed}), in float32 |
{decoder}| training time | {minutes:.0f} minutes |
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
    spec, recipe = trained.spec, trained.spec.recipe
    dataset = open_test_set(spec)
    assert dataset is not None, "the run was tested"
    dataset = limit_images(dataset, spec.max_test_images)
    test = evaluate_runs([trained], dataset)  # again: training may have had another precision
    options = "".join(f", {name}={value}" for name, value in spec.data_options.items())
    parts = [recipe.optimizer, recipe.lr_schedule, recipe.loss]
    return CARD.format(
        model=results["model"],
        n_parameters=trained.model.n_parameters,
        data=results["data"],
        options=options,
        n_test=test.n,
        recipe=f"{'; '.join(map(str, parts))}; batch size {recipe.batch_size}; augmentation {recipe.augmentation}",
        augmentation=recipe.augmentation,
        transforms=", ".join(map(str, trained.pipeline.test)),
        weights=results["eval_weights"],
        epochs=results["epochs"],
        steps=results["steps"],
        precision=spec.precision,
        accuracy=test.accuracy,
        low=test.interval[0],
        high=test.interval[1],
        n_errors=test.n - test.n_correct,
        decoder=describe_decoder(trained, dataset),
        seed=results["seed"],
        minutes=results["seconds"] / 60,
        command=command,
    )


def describe_decoder(trained: TrainedRun, dataset: Dataset) -> str:
    """Return the row of the card about the reconstructions of the test images; none without a decoder."""
    if not any(name.startswith("decoder.") for name in trained.model.state_dict()):
        return ""
    batches = list(trained.loader(dataset).epoch(0))
    images, labels = torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])
    error = float(reconstruct(trained.model, images, labels).error_by_label.mean()) / images[0].numel()
    return f"| reconstructions | mean squared error {error:.4f} per pixel, by label; decoder in half precision |\n"


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
