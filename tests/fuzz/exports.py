"""Mutated ONNX files for ``predict`` and ``evaluate``, and .h5 and .npz files for ``convert``.

Mutants: changed bytes, hostile nodes, sizes and metadata of a graph, and arrays of other shapes, types and names. A
mutant must be rejected in one line, or be loaded; a loaded graph is evaluated. No mutant may end the process, execute
code, take minutes or much memory, or raise anything else.
"""

import io
import math
import shutil
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz.harness import Case, Target
from tests.fuzz.mutate import INTERESTING, insert_call, mutate
from tests.fuzz.readers import CANARY
from torchcaps.export import ConversionError, convert_keras, load_onnx
from torchcaps.export.metadata import ExportFormatError, Metadata

__all__ = ["Exports"]

IMAGE, KERAS_IMAGE = (1, 6, 6), (1, 12, 12)
OPERATORS = ("Tile", "Expand", "Reshape", "Range", "ConstantOfShape", "Pad", "Resize", "Gather", "Softmax", "MatMul",
             "Add", "Loop", "If", "Identity", "Concat", "Conv", "Transpose", "Split", "Slice", "OneHot", "CumSum",
             "Cast", "StringNormalizer", "TfIdfVectorizer", "RandomNormal", "NonZero", "Unique", "Einsum",
             "ScatterND", "GatherND", "LSTM", "TopK", "Mod", "Div", "Sqrt", "ReduceSum", "EyeLike")  # fmt: skip
NUMBERS = (*INTERESTING, -1, 2, 3, 1000, 10**6, 2**20, 2**40)


class Exports(Target):
    """Files of models in other formats."""

    name, unit = "exports", "mutants"
    good = ("rejected", "loaded")

    def prepare(self, work: Path) -> None:
        """Write the valid files; put a module on the search path that must not be imported."""
        self.executed, modules = work / "executed", work / "modules"
        modules.mkdir(exist_ok=True)
        (modules / "canary.py").write_text(CANARY.format(path=str(self.executed)))
        sys.path.append(str(modules))
        self.scratch = work / "changed.h5"
        self.graph = make_graph()
        self.arrays = make_arrays()
        self.npz, self.h5 = as_npz(self.arrays), as_h5(self.arrays, work / "valid.h5")
        for name, content in (("a.onnx", self.graph.SerializeToString()), ("a.npz", self.npz), ("a.h5", self.h5)):
            (work / name).write_bytes(content)
            load(work / name)

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Load one mutant."""
        rng = np.random.default_rng([seed, index])
        kind = list(MUTATIONS)[int(rng.integers(len(MUTATIONS)))]
        shutil.rmtree(work / self.input, ignore_errors=True)
        (work / self.input).mkdir()
        path = work / self.input / f"model.{kind.partition(' ')[0]}"
        path.write_bytes(MUTATIONS[kind](self, rng))
        outcome, message = "loaded", ""
        try:
            load(path)
        except (ExportFormatError, ConversionError) as error:
            outcome, message = ("several-lines" if "\n" in str(error) else "rejected"), str(error)
        except BaseException as error:
            outcome, message = "exception", "".join(traceback.format_exception(error)[-3:])
        if self.executed.exists():
            self.executed.unlink()
            outcome, message = "executed", "code in the file was executed"
        return Case(index, kind, outcome, message)


def load(path: Path) -> None:
    """Load a file as its command does; evaluate a graph."""
    if path.suffix == ".onnx":
        run = load_onnx(path, num_threads=1)
        run.model(torch.zeros(2, *run.model.spec.image))
    else:
        convert_keras(path, KERAS_IMAGE)


# Valid files -----------------------------------------------------------------------------------------------------


def make_graph() -> Any:
    """Return a small graph with the outputs of an exported network."""
    rng = np.random.default_rng(0)
    values = {
        "kernel": rng.normal(size=(2, 1, 3, 3)).astype(np.float32),
        "weight": rng.normal(size=(32, 6)).astype(np.float32),
        "flat": np.array([0, -1]),
        "split": np.array([0, 3, 2]),
        "axis": np.array([2]),
        "copies": np.array([1, 1, 2]),
    }
    nodes = [
        helper.make_node("Conv", ["images", "kernel"], ["maps"], strides=[1, 1], group=1, pads=[0, 0, 0, 0]),
        helper.make_node("Relu", ["maps"], ["positive"]),
        helper.make_node("Reshape", ["positive", "flat"], ["features"]),
        helper.make_node("MatMul", ["features", "weight"], ["logits"]),
        helper.make_node("Reshape", ["logits", "split"], ["poses"]),
        helper.make_node("ReduceL2", ["poses", "axis"], ["scores"], keepdims=0),
        helper.make_node("Tile", ["poses", "copies"], ["capsules"]),
    ]
    batch = ["batch", *IMAGE]
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, batch)]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3]),
        helper.make_tensor_value_info("capsules", TensorProto.FLOAT, ["batch", 3, 4]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "network", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for key, value in Metadata(classes=("a", "b", "c"), image=IMAGE).to_text().items():
        model.metadata_props.add(key=key, value=value)
    return model


def make_arrays() -> dict[str, Any]:
    """Return the arrays of a small CapsNet, named as Keras names them."""
    shapes = {"conv1/kernel:0": (3, 3, 1, 5), "conv1/bias:0": (5,), "primary/kernel:0": (3, 3, 5, 12),
              "primary/bias:0": (12,), "digit/W:0": (1, 6, 48, 2, 4)}  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def as_npz(arrays: dict[str, Any]) -> bytes:
    """Return arrays as the content of an .npz file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:  # np.savez has parameters, whose names an array can't have
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=True)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
    return buffer.getvalue()


def as_h5(arrays: dict[str, Any], path: Path) -> bytes:
    """Return arrays as the content of an .h5 file; those that HDF5 can't store are left out."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            try:
                file[name] = array
            except (TypeError, ValueError, OSError, RuntimeError):
                continue
    return path.read_bytes()


# Mutations -------------------------------------------------------------------------------------------------------


def _pick(values: Any, rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _change_graph(target: Exports, rng: np.random.Generator) -> bytes:
    model = onnx.ModelProto()
    model.CopyFrom(target.graph)
    for _ in range(int(rng.integers(1, 4))):
        _change_graph_once(model, rng)
    return model.SerializeToString()


def _change_graph_once(model: Any, rng: np.random.Generator) -> None:
    graph = model.graph
    node, tensor, kind = _pick(graph.node, rng), _pick(graph.initializer, rng), int(rng.integers(10))
    number = int(_pick(NUMBERS, rng)) % 2**63
    if kind == 0:
        node.op_type = str(rng.choice(OPERATORS))
    elif kind == 1 and node.attribute:
        attribute = _pick(node.attribute, rng)
        attribute.i = number
        if attribute.ints:
            attribute.ints[int(rng.integers(len(attribute.ints)))] = number
    elif kind == 2:
        node.attribute.append(helper.make_attribute(str(rng.choice(["axis", "to", "axes", "value", "group"])), number))
    elif kind == 3 and tensor.data_type == TensorProto.INT64 and math.prod(tensor.dims) * 8 == len(tensor.raw_data):
        array = numpy_helper.to_array(tensor).copy()
        array[int(rng.integers(len(array)))] = number
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    elif kind == 4:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = number
    elif kind == 5:
        tensor.data_type = int(rng.integers(0, 25))
    elif kind == 6:
        names = [value for n in graph.node for value in (*n.input, *n.output)]
        node.input[int(rng.integers(len(node.input)))] = str(rng.choice(names))
    elif kind == 7:
        graph.node.append(node)
    elif kind == 8:
        entry = _pick(model.metadata_props, rng)
        texts = ["[]", "null", "1e400", '"canary.Net"', "[1, 60000, 60000]", "9" * 30, '"\\u001b"']
        entry.value = str(rng.choice(texts))
    else:
        value = _pick([*graph.input, *graph.output], rng)
        value.type.tensor_type.shape.dim[int(rng.integers(len(value.type.tensor_type.shape.dim)))].dim_value = number


def _change_arrays(target: Exports, rng: np.random.Generator) -> dict[str, Any]:
    arrays = dict(target.arrays)
    name, kind = _pick(list(arrays), rng), int(rng.integers(7))
    array = arrays[name]
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        shape = tuple(int(size) for size in rng.integers(0, 6, int(rng.integers(0, 7))))
        arrays[name] = np.zeros(shape, np.float32)
    elif kind == 2:
        dtype = rng.choice(["f2", ">f8", "g", "i8", "u1", "c8", "?", "S3", "M8[s]", "V4"])
        arrays[name] = np.zeros(array.shape, dtype)
    elif kind == 3:
        arrays[name] = np.array([{}, None], dtype=object)
    elif kind == 4:
        arrays[str(rng.choice(["conv1/kernel:1", "../x", "/x", "", "a" * 5000, "conv1/bias:0/x"]))] = array
    elif kind == 5:
        arrays[name] = np.full(array.shape, rng.choice([np.nan, np.inf, 3e38]), np.float32)
    else:
        arrays[name] = array[..., : int(rng.integers(0, array.shape[-1] + 1))]
    return arrays


def _insert_call(target: Exports, rng: np.random.Generator) -> bytes:
    """An array of objects is a pickle."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([None], dtype=object), allow_pickle=True)
    start = buffer.getvalue().index(b"\n") + 1
    content = buffer.getvalue()[:start] + insert_call(buffer.getvalue()[start:], str(target.executed), rng)
    output = io.BytesIO(target.npz)
    with zipfile.ZipFile(output, "a") as file:
        file.writestr("object.npy", content)
    return output.getvalue()


MUTATIONS: dict[str, Callable[[Exports, np.random.Generator], bytes]] = {
    "onnx bytes": lambda target, rng: mutate(target.graph.SerializeToString(), rng),
    "onnx graph": _change_graph,
    "npz bytes": lambda target, rng: mutate(target.npz, rng),
    "npz arrays": lambda target, rng: as_npz(_change_arrays(target, rng)),
    "npz calls": _insert_call,
    "h5 bytes": lambda target, rng: mutate(target.h5, rng),
    "h5 arrays": lambda target, rng: as_h5(_change_arrays(target, rng), target.scratch),
}
