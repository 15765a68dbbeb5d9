"""Python side of the compiled CPU kernel: describe a pass over the votes and split it between threads."""

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from torchcaps.votes import dispatch
from torchcaps.votes.cpu.build import load_library
from torchcaps.votes.dispatch import ChunkPlan
from torchcaps.votes.reductions import Reduction, kernel_index

__all__ = ["KernelCall", "backward_pass", "forward_pass"]

REGISTER_BYTES = 64  # the largest vector register (AVX-512): lanes are padded to a multiple of it

_Int, _Pair, _Four, _Pointer = ctypes.c_int64, ctypes.c_int64 * 2, ctypes.c_int64 * 4, ctypes.c_void_p


class Pass(ctypes.Structure):
    """Arguments of one pass over the votes: the struct ``Pass`` of ``kernel.cpp``, in the same order."""

    _fields_ = (
        *((name, _Int) for name in ("kind", "leak", "through", "lanes", "slots", "types", "cells")),
        *((name, _Int) for name in ("rows", "columns", "parents", "outs", "by_type")),
        *((name, _Pair) for name in ("sites", "grid", "kernel", "stride", "before")),
        ("steps", _Four),
        *((name, _Int) for name in ("chunk", "begin", "end")),
        *((name, _Pointer) for name in ("pose", "weight", "bias", "pairs", "first", "second", "result", "gradient")),
        *((f"{name}_grad", _Pointer) for name in ("pose", "weight", "bias", "pairs", "first", "second")),
        *((name, _Pointer) for name in ("activation", "constant", "mass", "squares")),
        *((name, _Pointer) for name in ("mass_gradient", "squares_gradient", "center")),
        *((f"{name}_grad", _Pointer) for name in ("activation", "constant")),
        ("similarity", _Int),
        ("least", ctypes.c_double),
        *((name, _Pointer) for name in ("shared", "classifier", "score", "score_gradient")),
        *((f"{name}_grad", _Pointer) for name in ("shared", "classifier")),
    )


def forward_pass(
    reduction: type[Reduction], plan: ChunkPlan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return the reduction of all votes; see `dispatch.kernel_supports` for the accepted arguments."""
    call = KernelCall(_kind(reduction), plan, pose, weight, bias, _named(reduction, arguments))
    parents = call.args.parents
    last = (parents, call.dim) if reduction.per_parent else (call.args.slots, parents)
    result = pose.new_empty(pose.shape[0], *plan.wiring.sites, *last)
    if not pose.is_meta:
        call.set_pointers(result=result)
        call.forward()
    return result


def backward_pass(
    reduction: type[Reduction],
    plan: ChunkPlan,
    needs: Sequence[bool],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of children, weight, bias and the reduction's arguments; ``None`` if not in ``needs``."""
    call = KernelCall(_kind(reduction), plan, pose, weight, bias, _named(reduction, arguments))
    call.args.through = getattr(reduction, "through", True)
    pose_grad = pose.new_zeros(pose.shape) if needs[0] else None
    weight_grad = pose.new_zeros(weight.shape) if needs[1] else None
    needs_bias = bias is not None and needs[2]
    bias_grad = pose.new_zeros(call.args.slots, call.args.parents, call.dim) if needs_bias else None
    needed = {name: call.arguments[name] for name, need in zip(call.arguments, needs[3:], strict=True) if need}
    # Gradients per parent are summed over child types, hence over threads: one buffer per thread.
    summed = [name for name in needed if name in ("first", "second") and call.args.through]
    buffers = {name: pose.new_zeros(call.n_threads, *needed[name].shape) for name in summed}
    pairs = {name: pose.new_empty(needed[name].shape) for name in needed if name == "pairs"}
    if not pose.is_meta:
        call.set_pointers(gradient=gradient, pose_grad=pose_grad, weight_grad=weight_grad, bias_grad=bias_grad)
        call.set_pointers(**{f"{name}_grad": tensor for name, tensor in pairs.items()})
        call.backward({f"{name}_grad": tensor for name, tensor in buffers.items()})
    gradients = {**pairs, **{name: tensor.sum(0) for name, tensor in buffers.items()}}
    if bias_grad is not None and bias is not None:
        bias_grad = bias_grad.sum_to_size(bias.shape[-3:]).view(bias.shape)
    return pose_grad, weight_grad, bias_grad, *(gradients.get(name) for name in call.arguments)


class KernelCall:
    """The arguments of a pass, and references to the tensors behind its pointers."""

    def __init__(
        self,
        kind: tuple[int, bool],
        plan: ChunkPlan,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arguments: dict[str, Tensor],
    ) -> None:
        wiring, args = plan.wiring, Pass()
        grid = wiring.grid or (1, 1)
        n_slots, columns, n_parents, outs = weight.shape
        args.kind, args.leak = kind
        self.plan = plan
        args.lanes = pose.shape[0] * math.prod(wiring.sites)
        args.slots, args.types, args.cells = n_slots, wiring.types, wiring.cells
        args.rows, args.columns = plan.rows, columns // wiring.children_per_slot
        args.parents, args.outs = n_parents, outs
        args.by_type = wiring.slot_kind == "type"
        args.sites, args.grid = _Pair(*(wiring.sites or (1, 1))), _Pair(*grid)
        args.kernel, args.stride = _Pair(*wiring.kernel), _Pair(*wiring.stride)
        args.before = _Pair(wiring.padding[0], wiring.padding[2])
        steps = [pose.shape[-1]]
        for size in (wiring.types, grid[1], grid[0]):
            steps.append(steps[-1] * size)
        args.steps = _Four(*reversed(steps))
        self.args, self.dim, self.n_lanes = args, plan.rows * outs, REGISTER_BYTES // pose.element_size()
        self.dtype = pose.dtype
        self.arguments = arguments
        self._references: list[Tensor] = []
        if bias is not None:
            bias = bias.reshape(bias.shape[-3:]).expand(n_slots, n_parents, self.dim)
        if not pose.is_meta:
            self.set_pointers(pose=pose, weight=weight, bias=bias, **self.arguments)
        work = args.lanes * n_slots * columns * plan.rows * n_parents * outs
        max_threads = work // dispatch.MIN_THREAD_WORK
        self.n_threads = int(max(1, min(torch.get_num_threads(), max_threads, wiring.types)))
        args.chunk = self._chunk_lanes(args.lanes)

    def set_pointers(self, **tensors: Tensor | None) -> None:
        """Set fields of the pass to the addresses of these tensors, and keep the tensors alive."""
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor = tensor.detach().contiguous()
                self._references.append(tensor)
                setattr(self.args, name, tensor.data_ptr())

    def _chunk_lanes(self, lanes: int) -> int:
        """Return the lanes per chunk: a multiple of a register's, and equal for all chunks.

        The last chunk takes as long as a full one, so a small remainder would waste time.
        """
        fitting = dispatch.MAX_PANEL_BYTES // (self.args.parents * self.dim * (REGISTER_BYTES // self.n_lanes))
        largest = max(1, min(dispatch.MAX_CHUNK_LANES, fitting) // self.n_lanes) * self.n_lanes
        n_chunks = -(-lanes // largest)
        return -(-lanes // (n_chunks * self.n_lanes)) * self.n_lanes

    def forward(self) -> None:
        """Run the forward pass, with the lanes split between threads."""
        per_thread = -(-self.args.lanes // self.n_threads)
        self.args.chunk = self._chunk_lanes(per_thread)
        per_thread = -(-per_thread // self.args.chunk) * self.args.chunk
        starts = range(0, self.args.lanes, per_thread)
        self._run("forward", [{"begin": start, "end": min(start + per_thread, self.args.lanes)} for start in starts])

    def backward(self, buffers: dict[str, Tensor]) -> None:
        """Run the backward pass, with the child types split between threads; buffers have one part per thread."""
        self._references += buffers.values()  # alive as long as threads, also if the caller is interrupted
        per_thread = -(-self.args.types // self.n_threads)
        parts: list[dict[str, Any]] = []
        for index, start in enumerate(range(0, self.args.types, per_thread)):
            pointers = {name: tensor[index].data_ptr() for name, tensor in buffers.items()}
            parts.append({"begin": start, "end": min(start + per_thread, self.args.types), **pointers})
        self._run("backward", parts)

    def _run(self, direction: str, parts: list[dict[str, Any]]) -> None:
        """Call the kernel once per part, in threads if there are several."""
        function = getattr(load_library(self.dtype), f"torchcaps_{direction}")

        def run(part: dict[str, Any]) -> None:
            """Call the kernel with the arguments of the pass, replaced by those of a part."""
            args = Pass.from_buffer_copy(self.args)
            for name, value in part.items():
                setattr(args, name, value)
            function(ctypes.byref(args))

        # The calling thread computes the first part. ctypes releases the interpreter lock.
        others: list[Future[None]] = []
        try:
            for part in parts[1:]:
                others.append(_thread_pool(os.getpid()).submit(run, part))
            run(parts[0])
        finally:
            wait(others)  # they write into tensors that this call owns
        for other in others:
            other.result()


@functools.lru_cache(maxsize=1)
def _thread_pool(process: int) -> ThreadPoolExecutor:
    """Return the threads that all passes of a process share; a forked process has none of them and starts its own.

    Threads start when they are first needed. Parts beyond their number wait.
    """
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torchcaps-kernel")


def _kind(reduction: type[Reduction]) -> tuple[int, bool]:
    """Return the kernel's number of a reduction, and whether there is a competitor without parent."""
    index = kernel_index(reduction)
    assert index is not None
    return index, getattr(reduction, "leak", False)


def _named(reduction: type[Reduction], arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return a reduction's arguments by the kernel's names: "pairs" has a slot axis, "first" and "second" don't."""
    names = iter(("first", "second"))
    return {
        "pairs" if slotted else next(names): tensor
        for slotted, tensor in zip(reduction.slotted, arguments, strict=True)
    }
