"""Time of the benchmark's layers on GPUs as their published bandwidth and throughput imply it; nothing is timed.

A layer's forward and backward pass runs on the meta device, where tensors have shapes and no values. Operations of
torch are counted as they are dispatched, Triton kernels as they would be launched: bytes of the tensors that each reads
and writes (views are free), and floating-point operations. Each takes at least the longer of its bytes at full
bandwidth and its operations at full throughput; the time of a path is their sum. Launches, caches and occupancy are
ignored.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from torchcaps.bench.cases import LAYER_CASES
from torchcaps.votes import dispatch
from torchcaps.votes.dispatch import override_thresholds
from torchcaps.votes.triton import launch, support
from torchcaps.votes.triton.launch import Launch

__all__ = ["GPUS", "Gpu", "Path", "Traffic", "count_traffic", "roofline_rows", "roofline_table"]

Path = Literal["stored votes", "chunks by torch", "Triton kernels"]
PATHS: tuple[Path, ...] = ("stored votes", "chunks by torch", "Triton kernels")


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Args:
        bandwidth: bytes per second of its memory.
        throughput: float32 operations per second, without tensor cores.
    """

    bandwidth: float
    throughput: float


GPUS = {"T4": Gpu(320e9, 8.1e12), "A100": Gpu(1555e9, 19.5e12), "H100 SXM": Gpu(3350e9, 67e12)}


@dataclass
class Traffic:
    """Bytes and floating-point operations of each operation of a computation."""

    operations: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes read and written."""
        return sum(n_bytes for n_bytes, _ in self.operations)

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add is two."""
        return sum(flops for _, flops in self.operations)

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time on a GPU."""
        return sum(max(n_bytes / gpu.bandwidth, flops / gpu.throughput) for n_bytes, flops in self.operations)


class _Count(TorchDispatchMode):
    """Add each operation of torch to a `Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = function.is_view or function is torch.ops.aten._unsafe_view.default
        if not is_view and "empty" not in function.name():
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.traffic.operations.append(
                (_n_bytes(inputs) + _n_bytes(outputs), _flops(function, inputs, outputs, args, kwargs, result))
            )
        return result


def _n_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the elements in memory: an expanded axis counts once."""
    sizes = [[size for size, step in zip(x.shape, x.stride(), strict=True) if step] for x in tensors]
    return sum(math.prod(size) * x.element_size() for size, x in zip(sizes, tensors, strict=True))


def _flops(function: Any, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of a matrix product or convolution; otherwise one per element."""
    count = flop_registry.get(function.overloadpacket)
    if count is not None:
        return int(count(*args, **(kwargs or {}), out_val=result))
    return max((x.numel() for x in (*inputs, *outputs)), default=0)


def _count_launch(call: Launch, traffic: Traffic) -> None:
    """Add a kernel: each tensor is read or written once, each vote computed once."""
    tensors = {x.data_ptr() or id(x): x for x in call.arguments.values() if isinstance(x, Tensor)}
    constants, sizes = call.constants, call.arguments
    n_lanes = sizes["pose"].shape[0] * constants["L0"] * constants["L1"]
    n_votes = n_lanes * sizes["n_slots"] * constants["J"] * constants["A"] * constants["Y"]
    product = 2 * constants["X"] * constants["PARTS"]  # of a vote, or of its gradient with a child or a matrix
    per_vote = {
        "reduce_to_parents": product + 4,
        "reduce_to_pairs": product + 4,
        "attend": product + 4,
        "attend_backward": product + 6,
        "pose_gradient": product + 4,
        "weight_gradient": product + 4,
    }[call.kernel]
    if constants.get("FORM") == "square":  # needs the votes
        per_vote += product
    traffic.operations.append((_n_bytes(list(tensors.values())), n_votes * per_vote))


@contextmanager
def _forced(path: Path, traffic: Traffic) -> Iterator[None]:
    """Count a path on the meta device, with all chunks and all launches."""
    before = support.DEVICES, launch.run, dispatch.has_kernel
    dispatch.has_kernel = lambda dtype: False
    support.DEVICES = ("meta",) if path == "Triton kernels" else ()
    launch.run = lambda call: _count_launch(call, traffic)
    try:
        with override_thresholds(META_CHUNKS=2**31):
            yield
    finally:
        support.DEVICES, launch.run, dispatch.has_kernel = before


def count_traffic(name: str, path: Path) -> Traffic:
    """Count the forward and backward pass of a layer of the benchmark."""
    traffic = Traffic()
    case = LAYER_CASES[name]
    with torch.device("meta"), _forced(path, traffic):
        layer = case.make()
        layer.streamed = path != "stored votes"
        children = torch.empty(case.shape, requires_grad=True)
        with _Count(traffic):
            pose = layer(children).pose
            torch.autograd.grad(pose, [children, *layer.parameters()], torch.empty_like(pose), allow_unused=True)
    return traffic


def roofline_rows(count: Callable[[str, Path], Traffic] = count_traffic) -> Iterator[dict[str, Any]]:
    """Yield a row per layer and path: bytes, operations and the least time on each GPU."""
    for name in LAYER_CASES:
        for path in PATHS:
            traffic = count(name, path)
            seconds = {gpu: traffic.seconds(figures) for gpu, figures in GPUS.items()}
            yield {"kind": "roofline", "case": name, "path": path, "bytes": traffic.n_bytes, "flops": traffic.flops,
                   "operations": len(traffic.operations), "seconds": seconds}  # fmt: skip


def roofline_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, as in ``docs/gpu.md``."""
    lines = [f"| layer | path | operations | MB moved | GFLOP | {' | '.join(f'{gpu}, ms' for gpu in GPUS)} |"]
    lines.append("|---|---|" + "---:|" * (3 + len(GPUS)))
    for row in rows:
        times = " | ".join(f"{1e3 * row['seconds'][gpu]:.2f}" for gpu in GPUS)
        numbers = f"{row['operations']:,} | {row['bytes'] / 1e6:,.0f} | {row['flops'] / 1e9:.1f}"
        lines.append(f"| {row['case']} | {row['path']} | {numbers} | {times} |")
    return "\n".join(lines)
