"""How a pass over votes is described to the kernel, and shared out between threads."""

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torchcaps.votes.cpu.build import REALS, library
from torchcaps.votes.dispatch import Plan
from torchcaps.votes.reductions import Attend, Dot, Reduction, SqDist, SqSum, Sum

__all__ = ["available", "can_take", "reduce_gradients", "reduce_votes"]

KINDS: tuple[type[Reduction], ...] = (Sum, Dot, SqSum, SqDist, Attend)  # in the order of the kernel's enum
REGISTER_BYTES = 64
MOST_LANES = 256
PANEL_BYTES = 2**17  # what a chunk of lanes takes for one number of every parent: a part of the second-level cache
MOST_WORK = 2**13  # multiply-adds for one row of one vote of a slot, X * Y: with more, torch's products are faster
WORTH_A_THREAD = 2**21  # multiply-adds, at least, for a thread of their own

_Int, _Pair, _Four, _Pointer = ctypes.c_int64, ctypes.c_int64 * 2, ctypes.c_int64 * 4, ctypes.c_void_p


class Pass(ctypes.Structure):
    """A pass over the votes: the struct ``Pass`` of ``kernel.cpp``, in its order."""

    _fields_ = (
        *((name, _Int) for name in ("kind", "leak", "through", "lanes", "slots", "types", "cells")),
        *((name, _Int) for name in ("rows", "columns", "parents", "outs", "by_type")),
        *((name, _Pair) for name in ("sites", "grid", "kernel", "stride", "before")),
        ("steps", _Four),
        *((name, _Int) for name in ("chunk", "begin", "end")),
        *((name, _Pointer) for name in ("pose", "weight", "bias", "pairs", "first", "second", "result", "gradient")),
        *((name, _Pointer) for name in ("of_pose", "of_weight", "of_bias", "of_pairs", "of_first", "of_second")),
    )


def available(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for this dtype here; it is compiled if it has to be."""
    return dtype in REALS and library(dtype) is not None


def can_take(
    reduction: type[Reduction], plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> bool:
    """Return whether the kernel can take this pass: plain tensors on the CPU, matrices that all places share."""
    tensors = [tensor for tensor in (pose, weight, bias, *arguments) if tensor is not None]
    return (
        _kind(reduction) is not None
        and all(_is_plain(tensor, pose) for tensor in tensors)
        and weight.dim() == 4
        and weight.shape[1] * weight.shape[3] <= MOST_WORK
        and (bias is None or math.prod(bias.shape[:-3]) == math.prod(plan.wiring.sites[: bias.dim() - 3]) == 1)
        and pose.numel() > 0
        and not torch.compiler.is_compiling()
        and available(pose.dtype)
    )


def _is_plain(tensor: Tensor, like: Tensor) -> bool:
    """Return whether there are numbers in memory behind a tensor: none of torch's stand-ins."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type in ("cpu", "meta")
        and (tensor.device, tensor.dtype, tensor.layout) == (like.device, like.dtype, torch.strided)
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]
    )


def _kind(reduction: type[Reduction]) -> int | None:
    return next((number for number, kind in enumerate(KINDS) if issubclass(reduction, kind)), None)


def reduce_votes(
    reduction: type[Reduction], plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return the reduction of all votes."""
    job = _Job(reduction, plan, pose, weight, bias, arguments)
    last = (job.own.parents, job.dim) if reduction.of_parents else (job.own.slots, job.own.parents)
    result = pose.new_empty(pose.shape[0], *plan.wiring.sites, *last)
    if not pose.is_meta:
        job.point(result=result)
        job.forward()
    return result


def reduce_gradients(
    reduction: type[Reduction],
    plan: Plan,
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of children, weight, bias and the reduction's arguments."""
    job = _Job(reduction, plan, pose, weight, bias, arguments)
    of_pose = pose.new_zeros(pose.shape)
    of_weight = pose.new_zeros(weight.shape)
    of_bias = None if bias is None else pose.new_zeros(job.own.slots, job.own.parents, job.dim)
    # Every thread adds up gradients of parents for itself.
    parents = [name for name in job.named if name in ("first", "second") and job.own.through]
    sums = {name: pose.new_zeros(job.n_threads, *job.named[name].shape) for name in parents}
    pairs = {name: pose.new_empty(job.named[name].shape) for name in job.named if name == "pairs"}
    if not pose.is_meta:
        job.point(gradient=gradient, of_pose=of_pose, of_weight=of_weight, of_bias=of_bias)
        job.point(**{f"of_{name}": tensor for name, tensor in pairs.items()})
        job.backward({f"of_{name}": tensor for name, tensor in sums.items()})
    found = {**pairs, **{name: tensor.sum(0) for name, tensor in sums.items()}}
    if of_bias is not None and bias is not None:
        of_bias = of_bias.sum_to_size(bias.shape[-3:]).view(bias.shape)
    return of_pose, of_weight, of_bias, *(found.get(name) for name in job.named)


class _Job:
    """A pass and the tensors that it points to, which have to live as long."""

    def __init__(
        self,
        reduction: type[Reduction],
        plan: Plan,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arguments: tuple[Tensor, ...],
    ) -> None:
        wiring, own = plan.wiring, Pass()
        grid = wiring.grid or (1, 1)
        n_slots, columns, n_parents, outs = weight.shape
        own.kind = _kind(reduction)
        own.leak, own.through = getattr(reduction, "leak", False), getattr(reduction, "through", True)
        own.lanes = pose.shape[0] * math.prod(wiring.sites)
        own.slots, own.types, own.cells = n_slots, wiring.types, wiring.cells
        own.rows, own.columns, own.parents, own.outs = plan.rows, columns // wiring.children_per_slot, n_parents, outs
        own.by_type = wiring.slot_kind == "type"
        own.sites, own.grid = _Pair(*(wiring.sites or (1, 1))), _Pair(*grid)
        own.kernel, own.stride = _Pair(*wiring.kernel), _Pair(*wiring.stride)
        own.before = _Pair(wiring.padding[0], wiring.padding[2])
        step = pose.shape[-1]
        steps = [step]
        for size in (wiring.types, grid[1], grid[0]):
            steps.append(steps[-1] * size)
        own.steps = _Four(*reversed(steps))
        self.own, self.dim, self.n_lanes = own, plan.rows * outs, REGISTER_BYTES // pose.element_size()
        self.dtype = pose.dtype
        self.named = dict(zip(_names(reduction), arguments, strict=True))
        self._alive: list[Tensor] = []
        if bias is not None:
            bias = bias.reshape(bias.shape[-3:]).expand(n_slots, n_parents, self.dim)
        if not pose.is_meta:
            self.point(pose=pose, weight=weight, bias=bias, **self.named)
        work = own.lanes * n_slots * columns * plan.rows * n_parents * outs
        self.n_threads = int(max(1, min(torch.get_num_threads(), work // WORTH_A_THREAD, wiring.types)))
        own.chunk = self._chunk(own.lanes)

    def point(self, **tensors: Tensor | None) -> None:
        """Tell the kernel where tensors are."""
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor = tensor.detach().contiguous()
                self._alive.append(tensor)
                setattr(self.own, name, tensor.data_ptr())

    def _chunk(self, lanes: int) -> int:
        """Return how many lanes to take at a time: a multiple of what a register holds, and alike for all chunks, since
        the last one takes as long as the others.
        """
        fitting = PANEL_BYTES // (self.own.parents * self.dim * (REGISTER_BYTES // self.n_lanes))
        most = max(1, min(MOST_LANES, fitting) // self.n_lanes) * self.n_lanes
        n_chunks = -(-lanes // most)
        return -(-lanes // (n_chunks * self.n_lanes)) * self.n_lanes

    def forward(self) -> None:
        """Run forward, each thread some of the lanes."""
        share = -(-self.own.lanes // self.n_threads)
        self.own.chunk = self._chunk(share)
        share = -(-share // self.own.chunk) * self.own.chunk
        starts = range(0, self.own.lanes, share)
        self._run("forward", [{"begin": start, "end": min(start + share, self.own.lanes)} for start in starts])

    def backward(self, sums: dict[str, Tensor]) -> None:
        """Run backward, each thread some of the child types, with its own place for sums over all of them."""
        share = -(-self.own.types // self.n_threads)
        parts: list[dict[str, Any]] = []
        for number, start in enumerate(range(0, self.own.types, share)):
            places = {name: tensor[number].data_ptr() for name, tensor in sums.items()}
            parts.append({"begin": start, "end": min(start + share, self.own.types), **places})
        self._run("backward", parts)

    def _run(self, direction: str, parts: list[dict[str, Any]]) -> None:
        function = getattr(library(self.dtype), f"torchcaps_{direction}")

        def run(part: dict[str, Any]) -> None:
            own = Pass.from_buffer_copy(self.own)
            for name, value in part.items():
                setattr(own, name, value)
            function(ctypes.byref(own))

        if len(parts) == 1:
            run(parts[0])
            return
        with ThreadPoolExecutor(len(parts)) as pool:  # the kernel is called without the interpreter's lock
            list(pool.map(run, parts))


def _names(reduction: type[Reduction]) -> tuple[str, ...]:
    """Return what the kernel calls a reduction's arguments: pairs have a slot axis, parents have none."""
    names = iter(("first", "second"))
    return tuple("pairs" if slotted else next(names) for slotted in reduction.slotted)
