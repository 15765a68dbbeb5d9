"""Write layer_tables.txt and recipes.txt from the models as they are: `python -m tests.models.write_tables`.

The two files are what the tests hold the models against, so whoever writes them anew reads the difference against the
papers first.
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
