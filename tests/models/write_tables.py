"""Write the snapshots layer_tables.txt and recipes.txt of all models: `python -m tests.models.write_tables`.

The tests compare the models with these two snapshots. Review their diff against the papers before you commit them.
"""

from pathlib import Path

import torch

import torchcaps
from tests.models.description import describe, describe_recipe

HERE = Path(__file__).resolve().parent


def main() -> None:
    layers, recipes = [], []
    for name in torchcaps.list_models():
        with torch.device("meta"):
            model = torchcaps.create_model(name)
        layers += [name, *(f"    {line}" for line in describe(model))]
        recipes.append(f"{name}: {describe_recipe(model.recipe)}")
    (HERE / "layer_tables.txt").write_text("\n".join(layers) + "\n")
    (HERE / "recipes.txt").write_text("\n".join(recipes) + "\n")


if __name__ == "__main__":
    main()
