"""Modules to export: models and capsule layers with named tensors as inputs and outputs."""

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.data.geometry import CenterCrop, PadTo
from torchcaps.data.transforms import Normalize, Standardize, SubtractMeanImage, Transform
from torchcaps.models import CapsuleNetwork, Network, Output
from torchcaps.nn import Decoder
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.votes import DenseVotes

__all__ = [
    "BATCH_SIZES",
    "DecoderProgram",
    "LayerProgram",
    "Program",
    "all_nodes",
    "as_inputs",
    "check_export_path",
    "export_program",
    "prepare",
    "quiet",
]

TRACED_BATCH_SIZE = 3  # of the example, different from both sizes at which parity is checked
BATCH_SIZES = (1, 5)


class Program(nn.Module):
    """Model whose output is a dict of tensors.

    Args:
        model: the model.
        trace: also return the couplings of every layer and iteration.
        transforms: preprocessing that is applied to the images first.
        decoder: whether to return the reconstruction, if the model has a decoder.
    """

    def __init__(
        self, model: Network, trace: bool = False, transforms: Sequence[Transform] = (), decoder: bool = True
    ) -> None:
        super().__init__()
        self.model, self.trace, self.has_decoder = model, trace, decoder
        self.transforms = nn.Sequential(*(_as_module(transform) for transform in transforms))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the named outputs for images ``[B, C, H, W]``."""
        output: Output = self.model(self.transforms(images), trace=self.trace)
        outputs = {"scores": output.scores}
        if output.capsules is not None:
            outputs |= _capsule_outputs(output.capsules, "capsules", "activations")
        if output.reconstruction is not None and self.has_decoder:
            outputs["reconstruction"] = output.reconstruction
        if output.trace:
            assert isinstance(self.model, CapsuleNetwork)
            layers = self.model.capsules.layers
            names = list(layers.keys()) if isinstance(layers, nn.ModuleDict) else range(len(layers))
            for name, trace in zip(names, output.trace, strict=True):
                outputs |= _couplings(f"{name}_", trace)
        return outputs


class LayerProgram(nn.Module):
    """Capsule layer whose output is a dict of tensors.

    Args:
        layer: the layer.
        trace: also return the couplings of every iteration.
    """

    def __init__(self, layer: CapsuleLayer, trace: bool = False) -> None:
        super().__init__()
        self.layer, self.trace = layer, trace

    def forward(self, pose: Tensor, activation: Tensor | None = None) -> dict[str, Tensor]:
        """Return the named outputs for children."""
        children = Capsules(pose, activation)
        if not self.trace:
            return _capsule_outputs(self.layer(children), "parent_pose", "parent_activation")
        parents, trace = self.layer(children, trace=True)
        return _capsule_outputs(parents, "parent_pose", "parent_activation") | _couplings("", trace)


class DecoderProgram(nn.Module):
    """Decoder of a model: class capsules and class indices in, reconstruction out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, capsules: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the reconstruction of the labelled capsules."""
        return {"reconstruction": self.decoder(capsules, labels)}


class _Standardize(nn.Module):
    """`torchcaps.data.transforms.Standardize` by two means instead of its long chain of pairwise sums."""

    def forward(self, images: Tensor) -> Tensor:
        """Return each image with mean 0 and standard deviation 1, unless it is nearly constant: ``[B, C, H, W]``."""
        centered = images - images.mean((1, 2, 3), keepdim=True)
        std = centered.square().mean((1, 2, 3), keepdim=True).sqrt()
        n_pixels = images.shape[1] * images.shape[2] * images.shape[3]
        return centered / std.clamp(min=n_pixels**-0.5 / 255)


class _SubtractMean(nn.Module):
    """Subtraction of a constant image."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", mean)

    def forward(self, images: Tensor) -> Tensor:
        return images - self.mean


class _Deterministic(nn.Module):
    """A transform without randomness."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        return self.transform(images, None)  # type: ignore[arg-type]


def _as_module(transform: Transform) -> nn.Module:
    """Return a transform as a module; raise a ValueError if it can't be part of a graph."""
    if isinstance(transform, Standardize):
        return _Standardize()
    if isinstance(transform, SubtractMeanImage) and transform.mean is not None:
        return _SubtractMean(transform.mean)
    if isinstance(transform, CenterCrop | PadTo | Normalize):
        return _Deterministic(transform)
    raise ValueError(f"preprocessing by {transform} can't be exported")


def _capsule_outputs(capsules: Capsules, pose: str, activation: str) -> dict[str, Tensor]:
    """Return pose and activation, if there is one, by these names of outputs."""
    outputs = {pose: capsules.pose}
    if capsules.activation is not None:
        outputs[activation] = capsules.activation
    return outputs


def _couplings(prefix: str, trace: Any) -> dict[str, Tensor]:
    couplings = {f"couplings_{prefix}{t}": coupling for t, coupling in enumerate(trace.couplings, start=1)}
    return {name: coupling.contiguous() for name, coupling in couplings.items() if coupling is not None}


def check_export_path(path: Path) -> None:
    """Raise a ValueError if a file can't be written, before an export that can take minutes."""
    directory = next((parent for parent in path.parents if parent.exists()), path.parent)
    if path.is_dir():
        raise ValueError(f"{path} can't be written: it is a directory")
    if not directory.is_dir():
        raise ValueError(f"{path} can't be written: {directory} is not a directory")
    if not os.access(directory, os.W_OK):
        raise ValueError(f"{path} can't be written: no permission to write to {directory}")


def prepare(module: nn.Module, stored: bool) -> nn.Module:
    """Return a copy on the CPU, in float32 and evaluation mode.

    Args:
        module: the module; it is not changed.
        stored: let all capsule layers store their votes, so that the graph has no operators of torchcaps. Layers with
            a solver always do: torch can't export its steps with streamed votes ("wrap_with_autocast is missing val").
    """
    if not isinstance(module, Network | CapsuleLayer):
        raise TypeError(f"model must be a torchcaps model or a capsule layer, got {type(module).__name__}")
    module = copy.deepcopy(module).to("cpu", torch.float32).eval().requires_grad_(False)
    for layer in module.modules():
        if isinstance(layer, CapsuleLayer) and (stored or layer.routing.approximate):
            layer.votes_factory = _store_votes
    return module


def _store_votes(layer: CapsuleLayer, children: Capsules, couplings: bool) -> DenseVotes:
    return DenseVotes.make(*layer.vote_inputs(children))


def as_inputs(module: nn.Module, example: Tensor | Capsules | None) -> dict[str, Tensor]:
    """Return the example inputs of a module by name, with at least as many images as parity is checked with.

    Args:
        module: a model or capsule layer.
        example: images ``[B, C, H, W]`` or children; default for a model: random images.
    """
    if isinstance(example, Capsules):
        inputs = {"pose": example.pose} if example.activation is None else example._asdict()
    elif isinstance(example, Tensor):
        inputs = {"images" if isinstance(module, Network) else "pose": example}
    elif isinstance(module, Network):
        generator = torch.Generator().manual_seed(0)
        inputs = {"images": torch.rand(max(BATCH_SIZES), *module.spec.image, generator=generator)}
    else:
        raise ValueError("example must be the children of the layer, a tensor or Capsules, got None")
    inputs = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in inputs.items()}
    n_images = len(next(iter(inputs.values())))
    if not n_images:
        raise ValueError("example must have at least one image, got none")
    repeats = -(-max(BATCH_SIZES) // n_images)
    return {name: torch.cat([tensor] * repeats)[: max(BATCH_SIZES)] for name, tensor in inputs.items()}


def export_program(module: nn.Module, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    """Return the graph of a module for any batch size."""
    example = tuple(tensor[:TRACED_BATCH_SIZE] for tensor in inputs.values())
    batch = torch.export.Dim("batch", min=1)
    shapes: Any = tuple({0: batch} for _ in example)
    with torch.no_grad(), quiet():
        program = torch.export.export(module, example, dynamic_shapes=shapes)
    for node in all_nodes(program):
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def all_nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a program and of the graphs inside of it, such as regions without autocast."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hide warnings and log messages of torch's exporters about packages that are not needed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
