"""Whether the Triton kernels exist on a device and compute a reduction; torch computes all others."""

import functools
import importlib.util
import math
import os
import shutil
import sys

import torch
from torch import Tensor

from torchcaps.votes.cpu.build import DISABLE_VARIABLE
from torchcaps.votes.reductions import Reduction, kernel_index
from torchcaps.votes.wiring import Wiring

__all__ = ["has_triton", "has_triton_for", "triton_supports"]

DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16)
MIN_CAPABILITY = (7, 5)  # the oldest GPU that the kernels are compiled for in the tests
MAX_PARENTS = 2**16 - 1  # programs on an axis of a grid that is not the first
MAX_SIZE = 256  # columns of a child's pose or of a vote: a tile has them all


def has_triton(device: torch.device) -> bool:
    """Return whether the kernels run on a device: an NVIDIA GPU, Triton installed, TORCHCAPS_KERNEL not 0."""
    return device.type in DEVICES and os.environ.get(DISABLE_VARIABLE) != "0" and _is_usable(device)


def has_triton_for(weight: Tensor) -> bool:
    """Return whether the kernels compute the reductions of a layer with these transformation matrices."""
    return (
        weight.device.type in DEVICES
        and weight.dtype in DTYPES
        and weight.dim() == 4
        and not torch.compiler.is_compiling()  # a graph must run on any machine
        and has_triton(weight.device)
    )


@functools.cache
def _is_usable(device: torch.device) -> bool:
    """Return whether Triton is installed and supports the device; AMD's GPUs, also called "cuda", are not tested."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    return _driver_starts()


@functools.cache
def _driver_starts() -> bool:
    """Return whether Triton can launch kernels; print the reason if not.

    On first use Triton compiles its launcher, a C module, which requires a C compiler and Python's headers. Some
    versions compile another one for each kernel, so that a compiler is required even if the first one is cached.
    """
    try:
        if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
            raise RuntimeError("no C compiler (gcc or clang) was found")
        from triton.runtime import driver  # optional dependency

        _ = driver.active.utils  # type: ignore[attr-defined]
    except Exception as error:  # of many kinds: no compiler, no headers, no driver
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        print(
            f"torchcaps: Triton can't start the GPU kernels, falling back to slower torch code: {reason}; install a C "
            f"compiler and Python's headers (or set CC), or set {DISABLE_VARIABLE}=0 to hide this note",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def triton_supports(
    reduction: type[Reduction], wiring: Wiring, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> bool:
    """Return whether the kernels compute this reduction: plain tensors on a GPU, matrices shared by all positions."""
    tensors = [tensor for tensor in (pose, weight, bias, *arguments) if tensor is not None]
    return (
        pose.device.type in DEVICES  # first: false in almost every call without a GPU
        and kernel_index(reduction) is not None
        and all(_is_plain(tensor, pose) for tensor in tensors)
        and weight.dim() == 4
        and max(weight.shape[1] // wiring.children_per_slot, weight.shape[3]) <= MAX_SIZE
        and weight.shape[2] <= MAX_PARENTS
        and (bias is None or math.prod(bias.shape[:-3]) == math.prod(wiring.sites[: bias.dim() - 3]) == 1)
        and all(tensor.numel() > 0 for tensor in tensors)
        and not torch.compiler.is_compiling()
        and has_triton(pose.device)
    )


def _is_plain(tensor: Tensor, like: Tensor) -> bool:
    """Return whether a tensor is strided memory of a supported dtype on the device of ``like``, not a wrapper."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype in DTYPES
        and (tensor.device, tensor.dtype, tensor.layout) == (like.device, like.dtype, torch.strided)
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]
    )
