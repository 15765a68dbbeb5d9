"""Conversion of CapsNets trained in Keras or TensorFlow: weights from .h5 or .npz into `Sabour2017`."""

import math
import os
import zipfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.parser_process import ParserError, parse_arrays
from torchcaps.models import Network, create_model

__all__ = ["ConversionError", "convert_keras", "read_arrays"]

SCRIPT = Path(__file__).with_name("keras_parser.py")
MAX_BYTES = 2**30  # of an .npz file
MAX_MEMORY_BYTES = 2**32  # of the process that parses an .h5 file
PARSER_TIMEOUT_S = 300
OPTIMIZER_GROUPS = ("optimizer", "optimizer_weights")  # moments have the shapes of the weights
ChildOrder = Literal["position", "type"]
ChannelOrder = Literal["type", "dim"]


class ConversionError(ValueError):
    """A file does not contain the weights of a CapsNet in the expected layout.

    >>> try:
    ...     convert_keras("missing.npz")
    ... except ConversionError as error:
    ...     print(error)
    missing.npz is not a file
    """


def read_arrays(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the arrays of an .npz file or, read in a child process, of an .h5 file. Nothing is unpickled."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConversionError(f"{path} is not a file")
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix not in (".h5", ".hdf5"):
        raise ConversionError(f"{path} must be an .h5, .hdf5 or .npz file")
    import_optional("h5py", "reading .h5 files")
    try:
        arrays = parse_arrays(SCRIPT, path, max_bytes=MAX_MEMORY_BYTES, timeout_s=PARSER_TIMEOUT_S)
    except ParserError as error:
        raise ConversionError(f"{path} can't be read: {str(error)[:200]}") from error
    return {name: array for name, array in arrays.items() if array is not None}


def _read_npz(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an ``.npz`` file in float32; raise a `ConversionError` if it is invalid or too large."""
    numpy = import_optional("numpy", "reading .npz files")
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise ConversionError(f"{path} has more than {MAX_BYTES:,} bytes")
        with numpy.load(path, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except ConversionError:
        raise
    except Exception as error:  # zipfile and numpy raise several types
        raise ConversionError(f"{path} is not a valid .npz file: {' '.join(str(error).split())[:200]}") from error
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise ConversionError(f"{path}: {name[:100]} is an array of complex numbers")
    return {name: tensor.float() for name, tensor in tensors.items()}


def convert_keras(
    path: str | os.PathLike[str],
    image: tuple[int, int, int] = (1, 28, 28),
    *,
    child_order: ChildOrder = "position",
    channel_order: ChannelOrder = "type",
) -> Network:
    """Return a `Sabour2017` network with the weights of a CapsNet in the usual Keras or TensorFlow layout.

    Expected are two convolutions ``[k, k, in, out]`` with biases, the transforms ``[J, I, D, K]`` (leading axes of
    size 1 are removed), and optionally the dense layers of the decoder ``[in, out]`` with biases. Arrays are recognised
    by their shapes, biases by the name of their kernel or as the only other array of its group. States of the
    optimizer are ignored. All widths follow from the shapes.

    Args:
        path: an .h5 or .npz file.
        image: image size ``(channels, height, width)``.
        child_order: order of the children in the transforms: ``"position"`` (row, column, type), as a reshape of a
            channels-last tensor gives, or ``"type"`` (type, row, column).
        channel_order: channel of element ``d`` of a type: ``"type"`` for ``type * K + d``, ``"dim"`` for
            ``d * types + type``.

    >>> import numpy, torch
    >>> shapes = {"conv": (9, 9, 1, 8), "primary": (9, 9, 8, 16), "digit": (10, 72, 16, 8)}
    >>> arrays = {f"{name}/kernel": numpy.zeros(shape, "float32") for name, shape in shapes.items()}
    >>> arrays |= {"conv/bias": numpy.zeros(8, "float32"), "primary/bias": numpy.zeros(16, "float32")}
    >>> numpy.savez("capsnet.npz", **arrays)
    >>> convert_keras("capsnet.npz")(torch.rand(2, 1, 28, 28)).scores.shape
    torch.Size([2, 10])
    """
    orders = (("child_order", child_order, ChildOrder), ("channel_order", channel_order, ChannelOrder))
    for argument, value, kind in orders:
        if value not in get_args(kind):
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
    if len(image) != 3 or min(image) < 1:
        raise ValueError(f"image must be (channels, height, width), each at least 1, got {image}")
    arrays = {name: x for name, x in read_arrays(path).items() if name.partition("/")[0] not in OPTIMIZER_GROUPS}
    for name, array in arrays.items():
        if not array.numel():
            raise ConversionError(f"{path}: {name[:100]} is an empty array {list(array.shape)}")
        if not bool(torch.isfinite(array).all()):
            raise ConversionError(f"{path}: {name[:100]} contains NaN or infinite values")
    kernels = {name: _squeeze(array) for name, array in arrays.items()}
    four = {name: array for name, array in kernels.items() if array.dim() == 4}
    conv1 = _single(path, "the first convolution [k, k, channels, width]", four, _is_kernel(image[0]))
    width = conv1[1].shape[3]
    rest = {name: array for name, array in four.items() if name != conv1[0]}
    primary = _single(path, f"the primary convolution [k, k, {width}, channels]", rest, _is_kernel(width))
    rest.pop(primary[0])
    _, transform = _single(path, "the transforms [J, I, D, K]", rest, lambda array: True)
    classes, children, dim, child_dim = transform.shape
    kernel = conv1[1].shape[0]
    if primary[1].shape[0] != kernel:
        sizes_found = f"{kernel}x{kernel} and {primary[1].shape[0]}x{primary[1].shape[0]}"
        raise ConversionError(f"{path}: both convolutions must have kernels of the same size, got {sizes_found}")
    if classes < 2:
        raise ConversionError(f"{path}: the transforms {list(transform.shape)} must have at least 2 classes (J)")
    grid = [(size - 2 * kernel + 2) // 2 + (size - 2 * kernel + 2) % 2 for size in image[1:]]
    types = primary[1].shape[3] // child_dim
    if min(grid) < 1 or types * child_dim != primary[1].shape[3] or children != types * grid[0] * grid[1]:
        raise ConversionError(
            f"{path}: the transforms {list(transform.shape)} do not fit {primary[1].shape[3]} primary channels on a "
            f"grid of {grid[0]}x{grid[1]}: check image={image}"
        )
    dense = _decoder(path, kernels, classes * dim, math.prod(image))
    sizes: dict[str, Any] = {"image": image, "classes": classes, "width": width, "types": types, "kernel": kernel}
    sizes |= {"primary_dim": child_dim, "dim": dim, "reconstruction": bool(dense)}
    if dense:
        sizes["hidden"] = tuple(array.shape[1] for _, array in dense[:-1])
    model = create_model("sabour2017_mnist", **sizes)
    state = {
        "front.conv1.weight": conv1[1].permute(3, 2, 0, 1),
        "front.conv1.bias": _bias(path, arrays, conv1[0], width),
        "front.primary.pose.weight": primary[1].permute(3, 2, 0, 1),
        "front.primary.pose.bias": _bias(path, arrays, primary[0], types * child_dim),
        "capsules.layers.digit.weight": transform.permute(1, 3, 0, 2),
    }
    if channel_order == "dim":
        for key in ("front.primary.pose.weight", "front.primary.pose.bias"):
            state[key] = state[key].unflatten(0, (child_dim, types)).transpose(0, 1).flatten(0, 1)
    if child_order == "type":
        key = "capsules.layers.digit.weight"
        state[key] = state[key].unflatten(0, (types, grid[0] * grid[1])).transpose(0, 1).flatten(0, 1)
    for index, (name, array) in enumerate(dense):
        state[f"decoder.layers.{2 * index}.weight"] = array.T
        state[f"decoder.layers.{2 * index}.bias"] = _bias(path, arrays, name, array.shape[1])
    model.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})
    return model.eval()


def _squeeze(array: Tensor) -> Tensor:
    """Remove leading axes of size 1 from an array with more than four axes."""
    while array.dim() > 4 and array.shape[0] == 1:
        array = array[0]
    return array


def _is_kernel(channels: int) -> Any:
    return lambda array: array.shape[0] == array.shape[1] and array.shape[2] == channels


def _single(path: Any, kind: str, arrays: dict[str, Tensor], fits: Any) -> tuple[str, Tensor]:
    """Return the only array that fits a description."""
    found = [(name, array) for name, array in arrays.items() if fits(array)]
    if len(found) != 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in list(arrays.items())[:8])
        raise ConversionError(f"{path}: expected one array for {kind}, found {len(found)} among {shapes or 'none'}")
    return found[0]


def _bias(path: Any, arrays: dict[str, Tensor], kernel: str, size: int) -> Tensor:
    """Return the bias next to a kernel: the array in the same group whose name contains "bias", or the only other.

    Keras 3 stores the kernel of a layer as ``layers/NAME/vars/0`` and its bias as ``layers/NAME/vars/1``.
    """
    group = kernel.replace("kernel", "bias").replace("weights", "biases")
    for name in (group, f"{kernel.rpartition('/')[0]}/bias", f"{kernel.rpartition('/')[0]}/bias:0"):
        if name in arrays and name != kernel and arrays[name].shape == (size,):
            return arrays[name]
    parent = kernel.rpartition("/")[0]
    others = [array for name, array in arrays.items() if name.rpartition("/")[0] == parent and name != kernel]
    if parent and len(others) == 1 and others[0].shape == (size,):
        return others[0]
    expected = group if group != kernel else f"{kernel}/bias, next to the kernel {kernel}/kernel"
    raise ConversionError(f"{path}: {kernel[:100]} has no bias of size {size}: expected an array {expected[:300]}")


def _decoder(path: Any, kernels: dict[str, Tensor], first: int, last: int) -> list[tuple[str, Tensor]]:
    """Return the dense layers of the decoder in order; empty if the file has none."""
    rest = {name: array for name, array in kernels.items() if array.dim() == 2}
    if not rest:
        return []
    layers: list[tuple[str, Tensor]] = []
    width = first
    while width != last or not layers:
        name, array = _single(path, f"a dense layer [{width}, out]", rest, lambda a, w=width: a.shape[0] == w)
        layers.append((name, array))
        rest.pop(name)
        width = array.shape[1]
    return layers
