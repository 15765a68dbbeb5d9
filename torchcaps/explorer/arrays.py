"""Tensors as JSON: shape, dtype and base64 of the little-endian values."""

import base64
import binascii
import math
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["decode_array", "decode_pixels", "encode_array"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8, "int32": torch.int32}


def encode_array(tensor: Tensor, dtype: str = "float32") -> dict[str, Any]:
    """Return a tensor as ``{"shape", "dtype", "data"}``.

    >>> encode_array(torch.tensor([0, 255]), "uint8")
    {'shape': [2], 'dtype': 'uint8', 'data': 'AP8='}
    """
    values = tensor.detach().cpu().to(DTYPES[dtype]).contiguous()
    return {"shape": list(values.shape), "dtype": dtype, "data": base64.b64encode(_to_bytes(values)).decode()}


def decode_array(value: dict[str, Any], name: str) -> Tensor:
    """Return the tensor of `encode_array`; raise a ValueError that starts with ``name`` if it is not one."""
    shape, dtype = value["shape"], value["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{name}.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    content = _decode_base64(value["data"], f"{name}.data")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if len(content) != expected:
        raise ValueError(f"{name}.data must have {expected} bytes for the shape {shape}, got {len(content)}")
    if not content:
        try:
            return torch.zeros(shape, dtype=DTYPES[dtype])
        except RuntimeError as error:  # strides that overflow
            raise ValueError(f"{name}.shape is too large: {shape}") from error
    tensor = torch.frombuffer(bytearray(content), dtype=DTYPES[dtype]).reshape(shape)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}.data must be finite, got NaN or infinite values")
    return tensor


def decode_pixels(text: str, shape: tuple[int, int, int], name: str = "pixels") -> Tensor:
    """Return an image in 0..1, ``[C, H, W]``, from the base64 of its bytes."""
    content = _decode_base64(text, name)
    if len(content) != math.prod(shape):
        size = "x".join(map(str, shape))
        raise ValueError(f"{name} must have {math.prod(shape)} bytes for an image of {size}, got {len(content)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape).float() / 255


def _decode_base64(text: str, name: str) -> bytes:
    """Decode base64; raise a ValueError that names the argument if the text is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} must be base64: {error}") from error


def _to_bytes(values: Tensor) -> bytes:
    """Return the little-endian bytes of a contiguous tensor."""
    if values.numel() == 0:
        return b""
    raw = values.flatten().view(torch.uint8)
    if sys.byteorder == "big" and values.element_size() > 1:
        raw = raw.view(-1, values.element_size()).flip(1).flatten()
    return bytes(raw.tolist()) if raw.numel() < 64 else raw.numpy().tobytes()
