"""Quantisation of exported ONNX files: dynamic int8, and float16 weights."""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from torchcaps._core.files import write_atomic
from torchcaps._core.optional import import_optional
from torchcaps.export.reader import validate_onnx

__all__ = ["Quantization", "quantize_onnx"]

Quantization = Literal["int8", "float16"]
MIN_ELEMENTS = 256  # smaller tensors, such as biases, stay in float32: they save nothing


def quantize_onnx(source: str | os.PathLike[str], target: str | os.PathLike[str], kind: Quantization) -> int:
    """Quantise the weights of an ONNX file; return the size of the result in bytes.

    ``"float16"`` stores weights in half precision and computes in float32. ``"int8"`` stores them in 8 bits:
    convolutions and linear layers also quantise their input, by the range of each batch (dynamic quantisation);
    transformation matrices are converted back to float32, since ONNX has no integer einsum.

    Args:
        source: a file written by `to_onnx`.
        target: the file to write, atomically.
        kind: see above.

    >>> import tempfile, torch, torchcaps
    >>> from torchcaps.export import to_onnx
    >>> model = torchcaps.create_model("capsnet_small", width=8, types=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     n_bytes = to_onnx(model, f"{directory}/model.onnx").n_bytes
    ...     n_small = quantize_onnx(f"{directory}/model.onnx", f"{directory}/small.onnx", "float16")
    >>> n_small < n_bytes
    True
    """
    if kind not in ("int8", "float16"):
        raise ValueError(f"kind must be 'int8' or 'float16', got {kind!r}")
    model = validate_onnx(Path(source).expanduser().read_bytes())
    if kind == "int8":
        model = _quantize_dynamic(model)
    _convert_weights(model, kind)
    content = model.SerializeToString(deterministic=True)
    validate_onnx(content)
    write_atomic(Path(target).expanduser(), content, ValueError)
    return len(content)


def _quantize_dynamic(model: Any) -> Any:
    """Return a model whose convolutions and linear layers compute with integers."""
    import_optional("onnxruntime", "quantisation")
    quantization = import_optional("onnxruntime.quantization", "quantisation")
    onnx = import_optional("onnx", "quantisation")
    del model.graph.value_info[:]  # the quantiser transposes some matrices and would find the old shapes inconsistent
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.onnx")
        logging.disable(logging.WARNING)  # advice on static quantisation
        # Unsigned, because onnxruntime has no integer convolution with signed weights on CPUs.
        try:
            quantization.quantize_dynamic(
                model, path, op_types_to_quantize=["Conv", "MatMul", "Gemm"], weight_type=quantization.QuantType.QUInt8
            )
        finally:
            logging.disable(logging.NOTSET)
        quantized = onnx.load(path)
    del quantized.metadata_props[:]  # the quantiser adds a key whose value is not JSON
    quantized.metadata_props.extend(model.metadata_props)
    used = {node.domain for node in quantized.graph.node}
    for entry in [entry for entry in quantized.opset_import if entry.domain not in used]:
        quantized.opset_import.remove(entry)
    return quantized


def _convert_weights(model: Any, kind: Quantization) -> None:
    """Store the large float32 tensors of a model in fewer bits, and convert them to float32 inside the graph."""
    onnx = import_optional("onnx", "quantisation")
    numpy = import_optional("numpy", "quantisation")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    graph, nodes = model.graph, []
    for tensor in list(graph.initializer):
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if values.size < MIN_ELEMENTS:
            continue
        name, small = tensor.name, f"{tensor.name}_{kind}"
        if kind == "float16":
            stored = [numpy_helper.from_array(values.astype(numpy.float16), small)]
            node = helper.make_node("Cast", [small], [name], to=onnx.TensorProto.FLOAT)
        else:
            axis = 0  # a scale for each row: each child of a capsule layer, each channel of a convolution
            others = tuple(range(1, values.ndim))
            scale = numpy.maximum(numpy.abs(values).max(axis=others), 1e-12).astype(numpy.float32) / 127
            shape = (-1, *(1,) * (values.ndim - 1))
            rounded = numpy.rint(values / scale.reshape(shape)).astype(numpy.int8)
            stored = [numpy_helper.from_array(rounded, small), numpy_helper.from_array(scale, f"{small}_scale")]
            node = helper.make_node("DequantizeLinear", [small, f"{small}_scale"], [name], axis=axis)
        graph.initializer.remove(tensor)
        graph.initializer.extend(stored)
        nodes.append(node)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
