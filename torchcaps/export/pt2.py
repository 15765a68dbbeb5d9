"""Export to a saved `torch.export` program (``.pt2``), checked by loading it again."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps._core.files import atomic_path
from torchcaps.capsules import Capsules
from torchcaps.data.transforms import Transform
from torchcaps.export.metadata import Metadata
from torchcaps.export.onnx_file import Exported
from torchcaps.export.parity import MAX_DIFFERENCE, check_parity
from torchcaps.export.program import (
    LayerProgram,
    Program,
    all_nodes,
    as_inputs,
    check_export_path,
    export_program,
    prepare,
    quiet,
)
from torchcaps.models import Network

__all__ = ["METADATA_FILE", "to_pt2"]

METADATA_FILE = "torchcaps.json"  # inside of the archive: torch.export.load(..., extra_files={METADATA_FILE: ""})


def to_pt2(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example: Tensor | Capsules | None = None,
    trace: bool = False,
    plain: bool = False,
    metadata: Metadata | None = None,
    transforms: Sequence[Transform] = (),
    limit: float = MAX_DIFFERENCE,
) -> Exported:
    """Export a model or capsule layer as a `torch.export` program, for any batch size, and check it.

    ``torch.export.load(path).module()(images)`` returns a dict of tensors with the names of `to_onnx`. The program
    needs ``import torchcaps`` first if it streams votes, unless it is ``plain``.

    Args:
        model: a model or a capsule layer, as for `to_onnx`.
        path: the file to write.
        example: inputs to compare with, as for `to_onnx`.
        trace: add the couplings of every layer and iteration as outputs.
        plain: store all votes, so that the program contains no operator of torchcaps and loads without it.
        metadata: classes and preprocessing; default: those that follow from the model.
        transforms: deterministic preprocessing that becomes part of the graph.
        limit: largest accepted difference, relative to ``max(1, |y|)``.

    >>> import tempfile, torch, torchcaps
    >>> layer = torchcaps.nn.DenseCapsules(6, 4, 3, 4, routing="dynamic")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = to_pt2(layer, f"{directory}/layer.pt2", example=torch.randn(2, 6, 4), plain=True)
    ...     program = torch.export.load(f"{directory}/layer.pt2").module()
    >>> program(torch.randn(7, 6, 4))["parent_pose"].shape
    torch.Size([7, 3, 4])
    """
    path = Path(path).expanduser()
    check_export_path(path)
    module, inputs = prepare(model, stored=plain), as_inputs(model, example)
    texts: dict[str, str] = {}
    if isinstance(module, Network):
        program = Program(module, trace, transforms)
        texts = (metadata or Metadata.of(module)).to_text()
    else:
        program = LayerProgram(module, trace)  # type: ignore[arg-type]
    graph = export_program(program, inputs)
    if plain:
        _check_plain(graph)
    with atomic_path(path, ValueError) as temporary, quiet():
        torch.export.save(graph, temporary, extra_files={METADATA_FILE: json.dumps(texts)})
        loaded = torch.export.load(temporary).module()
        parity = check_parity(program, lambda part: loaded(*part.values()), inputs, limit)
        outputs = program(*(tensor[:1] for tensor in inputs.values()))
        n_bytes = temporary.stat().st_size
    return Exported(path, parity, n_bytes, tuple(outputs))


def _check_plain(graph: torch.export.ExportedProgram) -> None:
    """Raise a ValueError if a program contains operators of torchcaps."""
    operators = {str(node.target) for node in all_nodes(graph) if str(node.target).startswith("torchcaps")}
    if operators:
        raise ValueError(f"the program contains operators of torchcaps: {', '.join(sorted(operators))}")
