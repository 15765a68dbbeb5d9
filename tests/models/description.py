"""Text of a network, one line per layer, and of a recipe: the snapshots in layer_tables.txt and recipes.txt."""

from typing import Any

from torch import nn

from torchcaps.models import Network, Recipe
from torchcaps.models.blocks import BasicBlock
from torchcaps.nn import CapsuleLayer, ConvCapsules, PrimaryCapsules
from torchcaps.profiling.summary import short_repr


def describe(model: Network) -> list[str]:
    """Return one line per layer, then schedule, head and decoder, and the number of objects if it is not 1."""
    lines = [_describe_module(module) for module in model.front]
    if hasattr(model, "capsules"):
        lines += [f"{name}: {_describe_capsules(layer)}" for name, layer in model.capsules.layers.items()]
        decoder = "" if model.decoder is None else f", decoder {[m.out_features for m in model.decoder.layers[::2]]}"
        lines.append(f"{model.capsules.schedule}, {model.spec.head}{decoder}")
    if model.n_objects != 1:
        lines.append(f"objects {model.n_objects}")
    return lines


def describe_recipe(recipe: Recipe) -> str:
    """Return the settings of a recipe as one line."""
    parts = [short_repr(part) for part in (recipe.loss, recipe.optimizer, recipe.lr_schedule)]
    duration = f"{recipe.epochs} epochs" if recipe.epochs else f"{recipe.steps} steps"
    parts += [f"batches of {recipe.batch_size}", duration, f"{recipe.ascents} ascents", recipe.data]
    weights = f"{recipe.eval_weights} weights" if recipe.eval_weights != "last" else ""
    validation = f"val_fraction {recipe.val_fraction:g}" if recipe.val_fraction else ""
    parts += [recipe.test_data, recipe.augmentation, weights, validation]
    return "; ".join(filter(None, parts))


def _window(module: Any) -> str:
    padding = module.padding if isinstance(module.padding, str) else module.padding[0]
    return f"{module.kernel_size[0]}x{module.kernel_size[1]} s{module.stride[0]} p{padding}"


def _describe_module(module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return f"conv {_window(module)} {module.out_channels}" + (" no bias" if module.bias is None else "")
    if isinstance(module, nn.BatchNorm2d):
        return f"norm {module.eps:g} {module.momentum:g}"
    if isinstance(module, nn.LeakyReLU):
        return f"leaky {module.negative_slope:g}"
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        return f"{type(module).__name__} {module.kernel_size}"
    if isinstance(module, nn.Linear):
        return f"linear {module.out_features}"
    if isinstance(module, nn.Dropout):
        return f"dropout {module.p:g}"
    if isinstance(module, BasicBlock):
        return f"block {module.conv2.out_channels} s{module.conv1.stride[0]}"
    if isinstance(module, PrimaryCapsules):
        text = f"primary {_window(module)} {module.types}x{module.dim} {type(module.activation).__name__}"
        text += " relu" * module.relu + " no bias" * (module.pose.bias is None)
        return text + " activations" * (module.activity is not None) + f" {module.scale:.4f}" * (module.scale != 1)
    return type(module).__name__.lower()


def _describe_capsules(layer: CapsuleLayer) -> str:
    g = layer.geometry
    window = f"conv {_window(layer)} {layer.weights}" if isinstance(layer, ConvCapsules) else "dense"
    return f"{window} {g.parents}x{g.dim} rows {g.rows} {short_repr(layer.routing)}"
