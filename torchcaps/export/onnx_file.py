"""Export to ONNX, checked against onnxruntime."""

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps._core.files import write_atomic
from torchcaps._core.machine import memory_limit
from torchcaps._core.optional import import_optional
from torchcaps.capsules import Capsules
from torchcaps.data.transforms import Transform
from torchcaps.export.metadata import Metadata
from torchcaps.export.parity import MAX_DIFFERENCE, Parity, ParityError, check_parity
from torchcaps.export.program import (
    DecoderProgram,
    LayerProgram,
    Program,
    as_inputs,
    check_export_path,
    export_program,
    prepare,
    quiet,
)
from torchcaps.models import CapsuleNetwork, Network

__all__ = ["Exported", "OnnxSession", "start_session", "to_onnx"]

OPSET = 20
MAX_FILE_BYTES = 2**31 - 1  # limit of protobuf
DecoderPlacement = Literal["inside", "beside", "none"]


@dataclass(frozen=True)
class Exported:
    """An exported file.

    Args:
        path: the file.
        parity: comparison with the module that was exported.
        n_bytes: size of the file.
        outputs: names of the outputs.
        decoder: path of the decoder, if it is in a file of its own.

    >>> import tempfile, torch, torchcaps
    >>> from torchcaps.export import to_onnx
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     exported = to_onnx(model, f"{directory}/model.onnx")
    >>> exported.path.name, exported.outputs, exported.parity.batch_sizes
    ('model.onnx', ('scores', 'capsules', 'reconstruction'), (1, 5))
    """

    path: Path
    parity: Parity
    n_bytes: int
    outputs: tuple[str, ...]
    decoder: Path | None = None


class OnnxSession:
    """An onnxruntime session that takes and returns tensors by name.

    Args:
        content: the file.
        num_threads: number of CPU threads; default: as many as torch uses.
        limit_memory: raise an error instead of taking more than half of the memory that this process may use: a
            graph can compute the sizes of its tensors from the image.
    """

    def __init__(self, content: bytes, num_threads: int | None = None, limit_memory: bool = False) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported
        runtime = import_optional("onnxruntime", "running ONNX files")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads or torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised; their log would print names in the file as they are
        if limit_memory:
            _register_limited_arena(runtime)
            options.add_session_config_entry("session.use_env_allocators", "1")
        arguments = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}  # a fallback would be the same
        self.session = runtime.InferenceSession(content, options, **arguments)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name. Inputs that the graph does not use are ignored."""
        arrays = {name: tensor.numpy() for name, tensor in inputs.items() if name in self.inputs}
        results = self.session.run(self.outputs, arrays)
        return {name: torch.from_numpy(array) for name, array in zip(self.outputs, results, strict=True)}


@functools.cache
def _register_limited_arena(runtime: Any) -> None:
    """Register the allocator of sessions with limited memory, once per process."""
    kind, memory = runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, runtime.OrtMemType.DEFAULT
    settings = (memory_limit() // 2, 1, -1, -1)  # extended by the requested size; the rest by default
    device = runtime.OrtMemoryInfo("Cpu", kind, 0, memory)
    with contextlib.suppress(RuntimeError):  # the application has registered its own
        runtime.create_and_register_allocator(device, runtime.OrtArenaCfg(*settings))


def start_session(content: bytes, num_threads: int | None = None) -> OnnxSession:
    """Start onnxruntime on the content of a trusted file; see `torchcaps.export.load_onnx` for others."""
    return OnnxSession(content, num_threads)


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example: Tensor | Capsules | None = None,
    trace: bool = False,
    decoder: DecoderPlacement = "inside",
    metadata: Metadata | None = None,
    transforms: Sequence[Transform] = (),
    limit: float = MAX_DIFFERENCE,
) -> Exported:
    """Export a model or capsule layer to ONNX, for any batch size, and check the file with onnxruntime.

    The file is written only if all outputs agree at two batch sizes; otherwise a `ParityError` is raised, and a file
    that exists already is unchanged. Votes are stored in the graph, since ONNX has no operator that streams them.

    Outputs of a model are ``scores``, ``capsules`` (and ``activations``, if it has them), ``reconstruction`` of the
    predicted classes, and with ``trace`` ``couplings_LAYER_ITERATION``. Outputs of a layer are
    ``parent_pose``, ``parent_activation`` and ``couplings_ITERATION``.

    Args:
        model: a model, or a `DenseCapsules` or `ConvCapsules` layer, with a fixed number of iterations. It is exported
            in float32 and evaluation mode, and not changed.
        path: the file to write.
        example: inputs to compare with: images ``[B, C, H, W]``, or the children of a layer. Default for models: random
            images.
        trace: add the couplings of every layer and iteration as outputs.
        decoder: ``"inside"`` the graph, ``"beside"`` in the file ``NAME-decoder.onnx`` (inputs ``capsules`` and
            ``labels``), or ``"none"``.
        metadata: classes and preprocessing; default: those that follow from the model.
        transforms: deterministic preprocessing that becomes part of the graph.
        limit: largest accepted difference, relative to ``max(1, |y|)``.

    >>> import tempfile, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     exported = to_onnx(model, f"{directory}/model.onnx")
    >>> exported.outputs, exported.parity.difference < 1e-5
    (('scores', 'capsules', 'reconstruction'), True)
    """
    if decoder not in ("inside", "beside", "none"):
        raise ValueError(f"decoder must be 'inside', 'beside' or 'none', got {decoder!r}")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import_optional(package, "export to ONNX")
    path = Path(path).expanduser()
    check_export_path(path)
    if decoder == "beside" and getattr(model, "decoder", None) is None:
        raise ValueError("decoder='beside' needs a model with a decoder, and this one has none")
    module, inputs = prepare(model, stored=True), as_inputs(model, example)
    texts: dict[str, str] = {}
    if isinstance(module, Network):
        program = Program(module, trace, transforms, decoder == "inside")
        texts = (metadata or Metadata.of(module)).to_text()
    else:
        program = LayerProgram(module, trace)  # type: ignore[arg-type]
    with torch.no_grad():
        outputs = program(*inputs.values())
    content, parity = _export(program, inputs, outputs, texts, limit)
    beside = None
    if decoder == "beside":
        assert isinstance(module, CapsuleNetwork)
        assert module.decoder is not None
        beside = path.with_name(f"{path.stem}-decoder{path.suffix}")
        labels = module.predict(outputs["scores"])
        decoding = DecoderProgram(module.decoder)
        arguments = {"capsules": outputs["capsules"], "labels": labels}
        decoder_content, _ = _export(decoding, arguments, decoding(**arguments), texts, limit)
        write_atomic(beside, decoder_content, ValueError)
    write_atomic(path, content, ValueError)
    return Exported(path, parity, len(content), tuple(outputs), beside)


def _export(
    program: nn.Module, inputs: dict[str, Tensor], outputs: dict[str, Tensor], metadata: Mapping[str, str], limit: float
) -> tuple[bytes, Parity]:
    """Return the file of a program, and its comparison with onnxruntime."""
    graph = export_program(program, inputs)
    with quiet():
        onnx_program: Any = torch.onnx.export(
            graph,
            (),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            external_data=False,
            input_names=list(inputs),
            output_names=list(outputs),
            custom_translation_table={
                torch.ops.aten.sort.stable: _stable_sort,
                torch.ops.aten.digamma.default: _digamma,
                torch.ops.aten._linalg_solve_ex.default: _solve,
            },
        )
    proto = onnx_program.model_proto
    _strip(proto.graph)
    for key, value in metadata.items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name = "torchcaps"
    content = proto.SerializeToString(deterministic=True)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the model has {len(content):,} bytes, more than the {MAX_FILE_BYTES:,} of an ONNX file")
    try:
        session = start_session(content)
    except Exception as error:  # onnxruntime raises types of its own
        raise ParityError(f"onnxruntime rejects the exported graph: {' '.join(str(error).split())}") from error
    return content, check_parity(program, session, inputs, limit)


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Return ``torch.sort(stable=True)`` as ONNX's TopK, which orders equal values by their index, too."""
    op = import_optional("onnxscript", "export to ONNX").opset18
    axis = dim if dim >= 0 else len(self.shape) + dim
    length = op.Shape(self, start=axis, end=axis + 1)
    return op.TopK(self, length, axis=axis, largest=int(descending), sorted=1)


def _digamma(self: Any) -> Any:
    """Return ``torch.digamma`` of positive values, which ONNX lacks: the recurrence to x + 6, then a series."""
    op = import_optional("onnxscript", "export to ONNX").opset18
    below = op.Reciprocal(self)
    for k in range(1, 6):
        below = op.Add(below, op.Reciprocal(op.Add(self, float(k))))
    large = op.Add(self, 6.0)
    inverse = op.Reciprocal(large)
    square = op.Mul(inverse, inverse)
    # 1/12 - y²(1/120 - y²/252), y = 1 / (x + 6); the next term is below 1e-9
    series = op.Sub(1 / 12, op.Mul(square, op.Sub(1 / 120, op.Mul(square, 1 / 252))))
    tail = op.Add(op.Mul(inverse, 0.5), op.Mul(square, series))
    return op.Sub(op.Sub(op.Log(large), tail), below)


def _solve(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """Return ``torch.linalg.solve_ex`` of a few equations, which ONNX lacks, by Gauss-Jordan elimination.

    It does not pivot: the matrices must be positive definite. LU factors, pivots and info are placeholders.
    """
    op = import_optional("onnxscript", "export to ONNX").opset18
    numpy, onnx = import_optional("numpy", "export to ONNX"), import_optional("onnx", "export to ONNX")
    size = int(A.shape[-1])
    rows = op.Concat(A, B, axis=-1)  # [B, m, m + n]
    for k in range(size):
        at, after = op.Constant(value_ints=[k]), op.Constant(value_ints=[k + 1])
        row = op.Slice(rows, at, after, op.Constant(value_ints=[1]))
        column = op.Slice(rows, at, after, op.Constant(value_ints=[2]))
        pivot = op.Div(row, op.Slice(row, at, after, op.Constant(value_ints=[2])))
        unit = op.Constant(value=onnx.numpy_helper.from_array(numpy.eye(size, dtype=numpy.float32)[:, k : k + 1]))
        rows = op.Sub(rows, op.Mul(op.Sub(column, unit), pivot))  # row k becomes the pivot row, column k a unit vector
    ends = (op.Constant(value_ints=[size]), op.Constant(value_ints=[2**31]), op.Constant(value_ints=[2]))
    return op.Slice(rows, *ends), op.Identity(A), op.Identity(B), op.Identity(B)


def _strip(graph: Any) -> None:
    """Remove source locations, which name paths of this machine, from a graph."""
    for item in (graph, *graph.node, *graph.value_info, *graph.input, *graph.output):
        del item.metadata_props[:]
        item.doc_string = ""
