"""Export of models to ONNX and `torch.export` programs, and use of exported files."""

from torchcaps.export.keras import ConversionError, convert_keras
from torchcaps.export.metadata import ExportFormatError, Metadata
from torchcaps.export.onnx_file import Exported, to_onnx
from torchcaps.export.parity import Parity, ParityError
from torchcaps.export.pt2 import to_pt2
from torchcaps.export.quantize import quantize_onnx
from torchcaps.export.reader import OnnxModel, load_onnx, validate_onnx
from torchcaps.export.run import export_run

__all__ = [
    "ConversionError",
    "ExportFormatError",
    "Exported",
    "Metadata",
    "OnnxModel",
    "Parity",
    "ParityError",
    "convert_keras",
    "export_run",
    "load_onnx",
    "quantize_onnx",
    "to_onnx",
    "to_pt2",
    "validate_onnx",
]
