"""Use of exported ONNX files, which are untrusted input: validation, and a model that runs in onnxruntime."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.optional import MissingExtraError, import_optional
from torchcaps.capsules import Capsules
from torchcaps.data import Pipeline, ScalePixels, list_datasets
from torchcaps.data.transforms import Normalize
from torchcaps.export.metadata import ExportFormatError, Metadata
from torchcaps.export.onnx_file import OnnxSession
from torchcaps.models import MODELS, Network, Output
from torchcaps.models.recipe import LossConfig, Recipe
from torchcaps.models.spec import ModelSpec
from torchcaps.training.config import RunSpec
from torchcaps.training.inference import TrainedRun

__all__ = ["OnnxModel", "load_onnx", "validate_onnx"]

MAX_FILE_BYTES = 2**30
MAX_NODES = 100_000
MAX_ELEMENTS = 2**28  # of one tensor for one image
MAX_TOTAL_ELEMENTS = 2**29  # of all constant tensors
STANDARD_DOMAINS = ("", "ai.onnx")
# Loops would run for as long as the file asks for; none of them is needed for a fixed number of iterations.
CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
BATCH_SIZE = 100


def validate_onnx(content: bytes) -> Any:
    """Parse an ONNX file and return its ``ModelProto``; raise an `ExportFormatError` if it is unsafe.

    Rejected are data in other files, operators outside of the standard domain, functions, control flow, and sizes
    beyond the limits of this module. Nothing of the graph is executed.

    >>> import tempfile, torch, torchcaps
    >>> from torchcaps.export import to_onnx
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     content = to_onnx(model, f"{directory}/model.onnx").path.read_bytes()
    >>> [output.name for output in validate_onnx(content).graph.output]
    ['scores', 'capsules', 'reconstruction']
    """
    onnx = import_optional("onnx", "reading ONNX files")
    if len(content) > MAX_FILE_BYTES:
        raise ExportFormatError(f"it has {len(content):,} bytes, more than {MAX_FILE_BYTES:,}")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf raises several types
        raise ExportFormatError("it is not an ONNX file") from error
    for entry in model.opset_import:
        if entry.domain not in STANDARD_DOMAINS:
            raise ExportFormatError(f"it uses operators of the domain {entry.domain!r}; only standard ONNX is accepted")
    if model.functions or model.training_info:
        raise ExportFormatError("it contains functions or training information; only a graph is accepted")
    if not model.graph.node:
        raise ExportFormatError("its graph has no nodes")
    _check_graph(model.graph)
    _check_shapes(onnx, model)
    return model


def _check_graph(graph: Any) -> None:
    """Check nodes and constants of a graph."""
    if len(graph.node) > MAX_NODES:
        raise ExportFormatError(f"its graph has more than {MAX_NODES:,} nodes")
    if graph.sparse_initializer:
        raise ExportFormatError("it contains sparse tensors")
    tensors = list(graph.initializer)
    for node in graph.node:
        if node.domain not in STANDARD_DOMAINS:
            raise ExportFormatError(
                f"it uses the operator {node.domain}.{node.op_type}; only standard ONNX is accepted"
            )
        if node.op_type in CONTROL_FLOW:
            raise ExportFormatError(f"it contains control flow ({node.op_type})")
        for attribute in node.attribute:
            if attribute.graphs or attribute.HasField("g"):
                raise ExportFormatError(f"its node {node.name!r} contains another graph")
            if attribute.sparse_tensors or attribute.HasField("sparse_tensor"):
                raise ExportFormatError("it contains sparse tensors")
            tensors += [*attribute.tensors, *([attribute.t] if attribute.HasField("t") else [])]
    total = 0
    for tensor in tensors:
        if tensor.data_location == 1 or tensor.external_data:  # TensorProto.EXTERNAL
            raise ExportFormatError(f"its tensor {tensor.name!r} is in another file, which is not read")
        total += _n_elements(tensor.dims)
        if total > MAX_TOTAL_ELEMENTS:
            raise ExportFormatError(f"its tensors have more than {MAX_TOTAL_ELEMENTS:,} elements")


def _check_shapes(onnx: Any, model: Any) -> None:
    """Check the sizes of all tensors for one image, as far as they can be inferred without running the graph."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        raise ExportFormatError("the shapes of its graph are inconsistent") from error
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        # A dimension without a value is the batch, or depends on it.
        sizes = [d.dim_value if d.HasField("dim_value") else 1 for d in value.type.tensor_type.shape.dim]
        if _n_elements(sizes) > MAX_ELEMENTS:
            raise ExportFormatError(f"its tensor {value.name!r} has more than {MAX_ELEMENTS:,} elements")


def _n_elements(sizes: Any) -> int:
    """Return the product of sizes; raise an `ExportFormatError` for a negative one."""
    total = 1
    for size in sizes:
        if size < 0:
            raise ExportFormatError("it contains a tensor with a negative size")
        total *= size
    return total


@dataclass(frozen=True, kw_only=True)
class _FileSpec(ModelSpec):
    """Image size and classes of a model in a file."""

    def build_network(self) -> Network:
        raise TypeError("a model in an ONNX file can't be built from its spec")

    def recipe(self) -> Recipe:
        return Recipe()


class OnnxModel(Network):
    """Model in an ONNX file: images in, `torchcaps.models.Output` out, computed by onnxruntime without gradients.

    Args:
        session: the session.
        metadata: metadata of the file.

    >>> import tempfile, torch, torchcaps
    >>> from torchcaps.export import to_onnx
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> from torchcaps.export import load_onnx
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     run = load_onnx(to_onnx(model, f"{directory}/model.onnx").path)
    >>> isinstance(run.model, OnnxModel), run.model(torch.rand(3, 1, 28, 28)).scores.shape
    (True, torch.Size([3, 10]))
    """

    def __init__(self, session: OnnxSession, metadata: Metadata) -> None:
        nn.Module.__init__(self)
        names = {"softmax": "cross_entropy", "sigmoid": "binary", "identity": "margin"}
        loss = LossConfig(names[metadata.probabilities], reconstruction_weight=0.0)  # type: ignore[arg-type]
        spec = _FileSpec(image=metadata.image, classes=len(metadata.classes))
        self.set_origin(spec, metadata.model, Recipe(loss, data=metadata.data), metadata.objects or None)
        self.session = session

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Run the graph. Labels are ignored: predicted classes are decoded. The trace is not available."""
        if images.dim() != 4 or tuple(images.shape[1:]) != self.spec.image:
            raise ValueError(f"images must be [B, {', '.join(map(str, self.spec.image))}], got {list(images.shape)}")
        try:
            found = self.session({"images": images.detach().to("cpu", torch.float32).contiguous()})
        except Exception as error:  # onnxruntime raises types of its own
            raise ExportFormatError(f"onnxruntime can't run its graph: {_shorten(error)}") from error
        scores = found["scores"]
        if scores.shape != (len(images), self.spec.classes):
            raise ExportFormatError(f"its scores must be [B, {self.spec.classes}], got {list(scores.shape)}")
        capsules = Capsules(found["capsules"], found.get("activations")) if "capsules" in found else None
        return Output(scores.float(), capsules, found.get("reconstruction"))


def load_onnx(path: str | os.PathLike[str], num_threads: int | None = None) -> TrainedRun:
    """Load an ONNX file written by `to_onnx`, for `predict` and `evaluate_runs` of `torchcaps.training`.

    The file is untrusted input; see `validate_onnx`. Its name of a data set is used only if it is registered.

    Args:
        path: the file.
        num_threads: number of CPU threads; default: as many as torch uses.

    Returns:
        A run whose model is an `OnnxModel`. Of its ``spec`` only the data set is that of the training.

    >>> import tempfile, torch, torchcaps
    >>> from torchcaps.export import to_onnx
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     run = load_onnx(to_onnx(model, f"{directory}/model.onnx").path)
    >>> images = torch.rand(3, 1, 28, 28)
    >>> bool((run.model(images).scores - model.eval()(images).scores).abs().max() < 1e-5)
    True
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ExportFormatError(f"{path}: it has {path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
    content = path.read_bytes()
    try:
        model = validate_onnx(content)
        metadata = Metadata.from_text({entry.key: entry.value for entry in model.metadata_props})
        session = _start(content, num_threads)
        if session.inputs != ["images"] or "scores" not in session.outputs:
            raise ExportFormatError("it must have the input 'images' and the output 'scores'")
    except ExportFormatError as error:
        raise ExportFormatError(f"{path}: {error}") from error
    network = OnnxModel(session, metadata).eval()
    data = metadata.data if metadata.data in list_datasets() else ""
    options = {"fit": metadata.fit} if metadata.fit else {}
    name = metadata.model if metadata.model in MODELS else RunSpec.model
    spec = RunSpec(name, recipe=Recipe(data=data, batch_size=BATCH_SIZE), data_options=options)
    scale = ScalePixels(metadata.scale)
    identity = not any(metadata.mean) and set(metadata.std) == {1.0}
    pipeline = Pipeline(test=[scale] if identity else [scale, Normalize(metadata.mean, metadata.std)])
    return TrainedRun(path, spec, network, pipeline, metadata.classes, "onnx", 0)


def _start(content: bytes, num_threads: int | None) -> OnnxSession:
    """Start a session; raise an `ExportFormatError` if onnxruntime rejects the graph."""
    try:
        return OnnxSession(content, num_threads, limit_memory=True)
    except MissingExtraError:
        raise
    except Exception as error:  # onnxruntime raises types of its own
        raise ExportFormatError(f"onnxruntime rejects it: {_shorten(error)}") from error


def _shorten(error: Exception) -> str:
    if "Available memory of" in str(error):  # of the arena
        return "it needs more than half of the memory that this process may use"
    return " ".join(str(error).split())[:200] or type(error).__name__
