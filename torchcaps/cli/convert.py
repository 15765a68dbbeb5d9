"""``torchcaps convert``."""

import json
from typing import Literal

from torchcaps._core.registry import check_name
from torchcaps.cli.console import exit_with_failure
from torchcaps.cli.parser import Parser
from torchcaps.data import list_datasets
from torchcaps.export import Metadata, ParityError, convert_keras, to_onnx

__all__ = ["convert_command"]

DESCRIPTION = (
    "Convert a CapsNet trained in Keras or TensorFlow to ONNX, for 'torchcaps predict' and 'torchcaps evaluate'. "
    "The file has two convolutions [k, k, in, out], the transforms [J, I, D, K] and optionally the dense layers of the "
    "decoder; all widths follow from the shapes. In Python, torchcaps.export.convert_keras returns the network."
)
EXAMPLES = (
    "torchcaps convert capsnet.h5 --out capsnet.onnx --data mnist",
    "torchcaps convert capsnet.npz --out capsnet.onnx --image 3,32,32",
)


def convert_command(arguments: list[str]) -> None:
    """Convert weights."""
    parser = Parser("torchcaps convert", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("weights", help="file of weights: .h5, read in a process of its own, or .npz")
    parser.add_argument("--out", type=str, default="model.onnx", help="ONNX file to write")
    text = "shape of the images: channels, height, width"
    parser.add_argument("--image", type=tuple[int, int, int], default=(1, 28, 28), help=text)
    text = "order of the children in the transforms: by position (row, column, type), or by type (type, row, column)"
    parser.add_argument("--child-order", type=Literal["position", "type"], default="position", help=text)
    text = "order of the primary channels: type * K + d, or d * types + type"
    parser.add_argument("--channel-order", type=Literal["type", "dim"], default="type", help=text)
    parser.add_argument("--data", type=str, default="", help="name of the data set of the training, for evaluate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, _ = parser.parse(arguments)
    if options.data:
        check_name(options.data, list_datasets(), "data set")
    orders = {"child_order": options.child_order, "channel_order": options.channel_order}
    model = convert_keras(options.weights, tuple(options.image), **orders)
    try:
        exported = to_onnx(model, options.out, metadata=Metadata.of(model, data=options.data))
    except ParityError as error:
        exit_with_failure(error)
    report = {"file": str(exported.path), "bytes": exported.n_bytes, "parameters": model.n_parameters}
    report["largest_difference"] = exported.parity.difference
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{exported.path}: {model.n_parameters:,} parameters, {exported.n_bytes:,} bytes")
        print(f"largest difference between torch and onnxruntime: {exported.parity.difference:.1e}")
