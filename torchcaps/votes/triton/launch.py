"""Python side of the Triton kernels: block sizes, grids, and the composition of reductions and gradients.

The gradient of a reduction's argument is another reduction (`torchcaps.votes.reductions`). The gradient of the votes is
a product of values per pair of slot and parent with values per parent (`tiles.vote_gradient`), so that it is
recomputed from small tensors by the kernels for children and weights, as the votes are.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps.votes import reductions
from torchcaps.votes.dispatch import ChunkPlan
from torchcaps.votes.reductions import Reduction

__all__ = ["Launch", "backward_pass", "forward_pass"]

TILE_SIZE = 2048  # votes that a program has at a time: 16 in the registers of each of 128 threads
PRODUCT_TILE_SIZE = 1024  # the same for kernels with tl.dot, whose operands take registers, too
MAX_ATTEND_SIZE = 4096  # votes of one lane for which softmax and sum are one kernel; more would spill registers
MAX_COLUMNS = 64  # columns of a tile, unless a program needs all parents
MIN_PROGRAMS = 512  # sums are split until there are so many programs, about four per multiprocessor of a large GPU
MIN_PRODUCT = 16  # least inner size of tl.dot


@dataclass(frozen=True)
class Launch:
    """A call of a kernel.

    Args:
        kernel: name of the function in `torchcaps.votes.triton.kernels`.
        grid: number of programs per axis.
        arguments: tensors and ints by name.
        constants: compile-time constants by name.
        n_warps: groups of 32 threads per program.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    n_warps: int


# One stage: loads are not pipelined through shared memory, which would exceed the 64 KiB of the smallest GPU.
LAUNCH_OPTIONS = {"num_stages": 1}


def run(launch: Launch) -> None:
    """Start a kernel on the device of its arguments; the first call with these constants compiles it."""
    from torchcaps.votes.triton import kernels  # optional dependency

    pose: Tensor = launch.arguments["pose"]
    on_device: AbstractContextManager[Any] = torch.cuda.device(pose.device) if pose.is_cuda else nullcontext()
    with on_device:
        kernel = getattr(kernels, launch.kernel)
        kernel[launch.grid](**launch.arguments, **launch.constants, num_warps=launch.n_warps, **LAUNCH_OPTIONS)


def forward_pass(
    reduction: type[Reduction], plan: ChunkPlan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return the reduction of all votes; see `support.triton_supports` for the accepted arguments."""
    layer = _Layer(plan, pose, weight, bias)
    if issubclass(reduction, reductions.Attend):
        result = layer.attend(reduction.leak, *arguments)
    elif reduction is reductions.Sum:
        result = layer.to_parents("sum", *arguments)
    elif reduction is reductions.SqSum:
        result = layer.to_parents("square", *arguments)
    elif reduction is reductions.Dot:
        result = layer.to_pairs("sum", *arguments)
    else:
        mean, scale = arguments
        result = layer.to_pairs("square", scale, mean)
    return result.to(pose.dtype)


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
    layer = _Layer(plan, pose, weight, bias, needs)
    of_arguments: tuple[Tensor | None, ...]
    if issubclass(reduction, reductions.Attend):
        (query,) = arguments
        coupling, logit_grad, query_grad = layer.attend_backward(reduction.leak, query, gradient)
        if reduction.through:
            of_inputs = layer.input_gradients("two_products", coupling, gradient, logit_grad, query)
            of_arguments = (query_grad,)
        else:
            of_inputs = layer.input_gradients("product", coupling, gradient)
            of_arguments = (None,)
    elif reduction is reductions.Sum:
        (coupling,) = arguments
        of_inputs = layer.input_gradients("product", coupling, gradient)
        of_arguments = (layer.to_pairs("sum", gradient) if needs[3] else None,)
    elif reduction is reductions.Dot:
        (query,) = arguments
        of_inputs = layer.input_gradients("product", gradient, query)
        of_arguments = (layer.to_parents("sum", gradient) if needs[3] else None,)
    elif reduction is reductions.SqSum:
        coupling, mean = arguments
        of_inputs = layer.input_gradients("square", coupling, gradient, other=mean)
        mean_grad = -2 * gradient * layer.to_parents("deviation", coupling, mean) if needs[4] else None
        of_arguments = (layer.to_pairs("square", gradient, mean) if needs[3] else None, mean_grad)
    else:
        mean, scale = arguments
        of_inputs = layer.input_gradients("square", gradient, scale, other=mean)
        mean_grad = -2 * scale * layer.to_parents("deviation", gradient, mean) if needs[3] else None
        of_arguments = (mean_grad, layer.to_parents("square", gradient, mean) if needs[4] else None)
    pose_grad, weight_grad, bias_grad = of_inputs
    if bias is not None and bias_grad is not None:
        bias_grad = bias_grad.sum_to_size(bias.shape[-3:]).view(bias.shape)
    found = zip((pose_grad, weight_grad, bias_grad, *of_arguments), needs, strict=True)
    return tuple(grad.to(pose.dtype) if grad is not None and needed else None for grad, needed in found)


class _Layer:
    """A layer's children, weights and wiring in the form that the kernels take; its methods return float32."""

    def __init__(
        self,
        plan: ChunkPlan,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool] = (True, True, True),
    ) -> None:
        wiring = plan.wiring
        self._needs_pose, self._needs_weights = needs[0], needs[1] or needs[2]
        self.n_slots, columns, self.n_parents, self.outs = weight.shape
        self.rows, self.dim = plan.rows, plan.rows * self.outs
        self.columns, self.sites = columns // wiring.children_per_slot, wiring.sites
        self.types, self.grid = wiring.types, wiring.grid or (1, 1)
        self.n_lanes = pose.shape[0] * math.prod(wiring.sites)
        self.pose = pose.detach().contiguous()
        # Slots that share their matrices are an expanded axis, which is not copied.
        weight = weight.detach()
        self.weight = weight if weight[:1].is_contiguous() else weight.contiguous()
        has_bias = bias is not None
        if bias is not None:
            bias = bias.detach().reshape(bias.shape[-3:]).expand(self.n_slots, self.n_parents, self.dim).contiguous()
        self.bias = self.pose if bias is None else bias  # not read without a bias
        self.cells = wiring.cells
        (l0, l1), (h, w) = wiring.sites or (1, 1), self.grid
        self.constants = {
            "HAS_BIAS": has_bias, "BY_TYPE": wiring.slot_kind == "type", "PARTS": wiring.children_per_slot,
            "A": self.rows, "X": self.columns, "J": self.n_parents, "Y": self.outs,
            "TYPES": wiring.types, "H": h, "W": w, "L0": l0, "L1": l1, "K1": wiring.kernel[1],
            "S0": wiring.stride[0], "S1": wiring.stride[1], "P0": wiring.padding[0], "P1": wiring.padding[2],
        }  # fmt: skip

    # Reductions --------------------------------------------------------------------------------------------------

    def to_parents(
        self, kind: Literal["sum", "deviation", "square"], pairs: Tensor, mean: Tensor | None = None
    ) -> Tensor:
        """Return ``Σ_i c v``, ``Σ_i c (v - mu)`` or ``Σ_i c (v - mu)²``, ``[B, *L, J, D]``."""
        blocks = self._blocks(self.n_lanes)
        pairs = pairs.contiguous()
        tensors = {"pairs": pairs, "mean": pairs if mean is None else mean.contiguous()}
        return self._sum_slots("reduce_to_parents", "total", blocks, {"KIND": kind}, **tensors)

    def to_pairs(self, kind: Literal["sum", "square"], factor: Tensor, mean: Tensor | None = None) -> Tensor:
        """Return ``<q, v>`` or ``<w, (v - mu)²>``, ``[B, *L, I, J]``."""
        blocks = self._blocks(self.n_lanes)
        factor = factor.contiguous()
        result = self._new(len(self.pose), *self.sites, self.n_slots, self.n_parents)
        tensors = {"factor": factor, "mean": factor if mean is None else mean.contiguous(), "result": result}
        n_splits, slots_per_split = self._split(blocks, self.n_slots)
        sizes = {**self._sizes(), "slots_per_split": slots_per_split}
        self._run("reduce_to_pairs", blocks, n_splits, {**tensors, **sizes}, {"KIND": kind})
        return result

    def attend(self, leak: bool, query: Tensor) -> Tensor:
        """Return ``Σ_i c v`` with couplings ``c = softmax_j <q, v>``."""
        blocks = self._blocks(self.n_lanes, all_parents=True)
        if not _fits(blocks):
            return self.to_parents("sum", _softmax(self.to_pairs("sum", query), leak))
        return self._sum_slots("attend", "total", blocks, {"LEAK": leak}, query=query.contiguous())

    def attend_backward(self, leak: bool, query: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return couplings, gradients of the logits and gradients of the query."""
        blocks = self._blocks(self.n_lanes, all_parents=True)
        if not _fits(blocks):
            coupling, coupling_grad = _softmax(self.to_pairs("sum", query), leak), self.to_pairs("sum", gradient)
            logit_grad = coupling * (coupling_grad - (coupling * coupling_grad).sum(-1, keepdim=True))
            return coupling, logit_grad, self.to_parents("sum", logit_grad)
        size = (len(self.pose), *self.sites, self.n_slots, self.n_parents)
        pairs = {"coupling": self._new(*size), "logit_grad": self._new(*size)}
        tensors = {"query": query.contiguous(), "gradient": gradient.contiguous(), **pairs}
        query_grad = self._sum_slots("attend_backward", "query_grad", blocks, {"LEAK": leak}, **tensors)
        return pairs["coupling"], pairs["logit_grad"], query_grad

    # Gradients of children, weights and bias ---------------------------------------------------------------------

    def input_gradients(
        self,
        form: Literal["product", "two_products", "square"],
        pairs: Tensor,
        factor: Tensor,
        other_pairs: Tensor | None = None,
        other: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the needed gradients of children, weight and bias; see `tiles.vote_gradient` for the arguments."""
        pairs, factor = pairs.contiguous(), factor.contiguous()
        tensors = {
            "pairs": pairs,
            "factor": factor,
            "other_pairs": pairs if other_pairs is None else other_pairs.contiguous(),
            "other": factor if other is None else other.contiguous(),
        }
        pose_grad = self._pose_gradient(form, tensors) if self._needs_pose else None
        weight_grad, bias_grad = self._weight_gradients(form, tensors) if self._needs_weights else (None, None)
        return pose_grad, weight_grad, bias_grad

    def _pose_gradient(self, form: str, tensors: dict[str, Tensor]) -> Tensor:
        """Return the gradient of the children."""
        pose_grad = self._new(*self.pose.shape)
        n_positions = len(self.pose) * math.prod(self.grid)
        blocks = self._blocks(n_positions, product=True)
        arguments = {**tensors, "pose_grad": pose_grad, "n_positions": n_positions, **self._sizes()}
        del arguments["n_lanes"]
        grid = (-(-n_positions // blocks["BS"]) * self.types, 1, 1)
        self._launch("pose_gradient", grid, arguments, {"FORM": form, "CELLS": self.cells, **blocks})
        return pose_grad

    def _weight_gradients(self, form: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of weight and bias."""
        blocks = self._blocks(self.n_lanes, product=True)
        parts = self.constants["PARTS"]
        lane_blocks, parent_blocks = -(-self.n_lanes // blocks["BS"]), -(-self.n_parents // blocks["BJ"])
        n_splits = max(1, min(lane_blocks, MIN_PROGRAMS // (self.n_slots * parts * parent_blocks)))
        blocks_per_split = -(-lane_blocks // n_splits)
        n_splits = -(-lane_blocks // blocks_per_split)
        weight_grad = self._new(n_splits, self.n_slots, parts * self.columns, self.n_parents, self.outs)
        has_bias = self.constants["HAS_BIAS"]
        bias_grad = self._new(n_splits, self.n_slots, self.n_parents, self.dim) if has_bias else weight_grad
        arguments = {**tensors, "weight_grad": weight_grad, "bias_grad": bias_grad, **self._sizes()}
        arguments["blocks_per_split"] = blocks_per_split
        grid = (self.n_slots * parts, parent_blocks, n_splits)
        self._launch("weight_gradient", grid, arguments, {"FORM": form, **blocks})
        return _sum_splits(weight_grad), _sum_splits(bias_grad) if has_bias else None

    # Launches ----------------------------------------------------------------------------------------------------

    def _blocks(self, n_rows: int, all_parents: bool = False, product: bool = False) -> dict[str, int]:
        """Return the block sizes for this many lanes or child positions; ``product``: of a kernel with `tl.dot`."""
        blocks = {"BA": _power(self.rows), "BY": _power(self.outs)}
        parents = _power(self.n_parents)
        if not all_parents:
            parents = min(parents, max(1, MAX_COLUMNS // blocks["BY"]))
        if product:
            parents = max(parents, MIN_PRODUCT // blocks["BY"])
            blocks["BX"] = max(MIN_PRODUCT, _power(self.columns))
        size = min(TILE_SIZE, PRODUCT_TILE_SIZE) if product else TILE_SIZE
        lanes = size // (parents * blocks["BY"] * blocks["BA"])
        lanes = max(1, min(lanes, _power(n_rows)))
        if product:
            lanes = max(lanes, MIN_PRODUCT // blocks["BA"])
        return {"BS": lanes, "BJ": parents, **blocks}

    def _split(self, blocks: dict[str, int], n_slots: int) -> tuple[int, int]:
        """Return the number of splits of the slots, and the slots of each."""
        n_programs = -(-self.n_lanes // blocks["BS"]) * -(-self.n_parents // blocks["BJ"])
        slots_per_split = -(-n_slots // max(1, min(n_slots, MIN_PROGRAMS // n_programs)))
        return -(-n_slots // slots_per_split), slots_per_split

    def _sum_slots(
        self, kernel: str, name: str, blocks: dict[str, int], constants: dict[str, Any], **tensors: Tensor
    ) -> Tensor:
        """Run a kernel whose result ``name`` is a sum over slots per split; return the sum, ``[B, *L, J, D]``."""
        n_splits, slots_per_split = self._split(blocks, self.n_slots)
        parts = self._new(n_splits, len(self.pose), *self.sites, self.n_parents, self.dim)
        sizes = {**self._sizes(), "slots_per_split": slots_per_split}
        self._run(kernel, blocks, n_splits, {**tensors, name: parts, **sizes}, constants)
        return _sum_splits(parts)

    def _run(
        self, kernel: str, blocks: dict[str, int], n_splits: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """Launch a kernel on a grid of lanes, parents and splits of the slots in these blocks."""
        grid = (-(-self.n_lanes // blocks["BS"]), -(-self.n_parents // blocks["BJ"]), n_splits)
        self._launch(kernel, grid, arguments, {**constants, **blocks})

    def _launch(
        self, kernel: str, grid: tuple[int, int, int], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """Launch a kernel with the layer's tensors and constants added to the arguments."""
        inputs = {"pose": self.pose, "weight": self.weight, "bias": self.bias}
        votes_per_program = math.prod(constants[name] for name in ("BS", "BA", "BJ", "BY"))
        n_warps = 4 if votes_per_program <= TILE_SIZE else 8
        run(Launch(kernel, grid, {**inputs, **arguments}, {**constants, **self.constants}, n_warps))

    def _sizes(self) -> dict[str, int]:
        return {"n_lanes": self.n_lanes, "n_slots": self.n_slots, "slot_step": self.weight.stride(0)}

    def _new(self, *size: int) -> Tensor:
        return self.pose.new_empty(size, dtype=torch.float32)


def _power(size: int) -> int:
    """Return the least power of two that is not less than a size."""
    return 1 << (size - 1).bit_length()


def _fits(blocks: dict[str, int]) -> bool:
    """Return whether all votes of a lane and slot fit into the registers of one program."""
    return blocks["BA"] * blocks["BJ"] * blocks["BY"] <= MAX_ATTEND_SIZE


def _softmax(logits: Tensor, leak: bool) -> Tensor:
    """Return the softmax over parents, with a competitor of logit 0 if ``leak``."""
    if not leak:
        return logits.softmax(-1)
    return torch.cat([torch.zeros_like(logits[..., :1]), logits], dim=-1).softmax(-1)[..., 1:]


def _sum_splits(parts: Tensor) -> Tensor:
    """Return the sum over the first axis, without a copy if it has one element."""
    return parts[0] if len(parts) == 1 else parts.sum(0)
