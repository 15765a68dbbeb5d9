"""Estimate the peak memory of training on a CPU without running on data.

One training step of a copy of the model runs on the meta device, where tensors have shapes but no values. Every
allocation and release is recorded and replayed twice (two steps) in a model of the C library's heap, because a process
holds more memory than its tensors need.
"""

import bisect
import copy
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchcaps.capsules import Capsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.nn.sizes import as_count
from torchcaps.votes import Votes
from torchcaps.votes.dispatch import VotePath

if TYPE_CHECKING:
    from torchcaps.models.network import Network

__all__ = ["AllocationRecorder", "Heap", "TrainingMemory", "estimate_memory", "forward_memory"]

Module = TypeVar("Module", bound=nn.Module)
Event = tuple[int, int | None]  # (block, bytes) for an allocation, (block, None) for its release

# Factors for workspaces of torch's kernels and for fragmentation that the heap model does not include; votes streamed
# by torch fragment more. `torchcaps bench estimates` compares the result with measurements.
SAFETY_FACTOR, SAFETY_FACTOR_STREAMED_TORCH = 1.15, 1.3


@dataclass(frozen=True)
class TrainingMemory:
    """Estimated peak memory of training, in bytes.

    Args:
        weights: parameters and buffers.
        optimizer: optimizer state.
        step: largest total size of the tensors of a step: batch, saved activations, gradients.
        total: memory of the process for all of these, including fragmentation and a safety factor.
        votes: size of all vote tensors of the batch if they were stored.

    >>> import torchcaps
    >>> from torchcaps.profiling import estimate_memory
    >>> memory = estimate_memory(torchcaps.create_model("capsnet_small"), batch_size=64)
    >>> isinstance(memory, TrainingMemory), memory.weights
    (True, 5122880)
    """

    weights: int
    optimizer: int
    step: int
    total: int
    votes: int


def estimate_memory(
    model: "Network", batch_size: int, streamed: bool | Literal["auto"] | None = None
) -> TrainingMemory:
    """Estimate the peak memory of training with the optimizer of the model's recipe, on a CPU.

    GPU workspaces and copies are not included.

    Args:
        model: the model, on any device including meta; it is not changed.
        batch_size: images per training step.
        streamed: overrides the option of all capsule layers; default: as each layer is set.

    >>> import torchcaps
    >>> memory = estimate_memory(torchcaps.create_model("capsnet_small"), batch_size=64)
    >>> memory.total > memory.weights + memory.optimizer
    True
    """
    as_count(batch_size, "batch_size")
    twin = _copy_to_meta(model).train()
    layers = [layer for layer in twin.modules() if isinstance(layer, CapsuleLayer)]
    for layer in layers:
        layer.streamed = layer.streamed if streamed is None else streamed
    votes: dict[CapsuleLayer, _LayerVotes] = {}

    def record_votes(layer: CapsuleLayer, children: Capsules, couplings: bool) -> Votes:
        """Return the default votes of a layer, and record their size and computation path."""
        made = layer.default_votes(children, couplings)
        n_bytes = math.prod(made.shape) * children.pose.element_size()
        votes[layer] = _LayerVotes(n_bytes, layer.path(children.pose, made.wiring))
        return made

    for layer in layers:
        layer.votes_factory = record_votes
    events = _record_step(twin, batch_size)
    parameters = [_size(parameter) for parameter in twin.parameters()]
    buffers = [_size(buffer) for buffer in twin.buffers()]
    n_states = model.recipe.optimizer.n_states
    weights, optimizer = sum(parameters) + sum(buffers), n_states * sum(parameters)
    peak = _replay_training(events, parameters, buffers, n_states)
    by_torch = any(layer_votes.path is VotePath.STREAMED_TORCH for layer_votes in votes.values())
    factor = SAFETY_FACTOR_STREAMED_TORCH if by_torch else SAFETY_FACTOR
    return TrainingMemory(
        weights=weights,
        optimizer=optimizer,
        step=_peak_of_tensors(events),
        total=weights + optimizer + int(factor * (peak - weights - optimizer)),
        votes=sum(layer_votes.n_bytes for layer_votes in votes.values()),
    )


def forward_memory(model: "Network", batch_size: int) -> int:
    """Return the largest total size of the tensors of a forward pass without gradients, in bytes, without weights.

    Args:
        model: the model, on the meta device.
        batch_size: images per forward pass.
    """
    recorder = AllocationRecorder()
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.ignore(tensor)
    with torch.no_grad(), recorder:
        model(torch.empty(batch_size, *model.spec.image, device="meta"))
    return _peak_of_tensors(recorder.events.copy())


class _LayerVotes(NamedTuple):
    """Size of a layer's votes, and its computation path."""

    n_bytes: int
    path: VotePath


def _copy_to_meta(model: Module) -> Module:
    """Return a copy of a model on the meta device."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


# Allocations of a training step ---------------------------------------------------------------------------------


class AllocationRecorder(TorchDispatchMode):
    """Record every allocation and release of a tensor's storage inside the context, in ``events``."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._n_blocks = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(tensor)
        if func is torch.ops.aten.convolution.default:
            self._record_copies(args[0], args[1], result)
        elif func is torch.ops.aten.convolution_backward.default:
            gradient, images, weight = args[:3]
            self._record_copies(gradient, weight, result[0])
            self._record_copies(gradient, images, result[1])
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a tensor that exists already."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage)

    def _record(self, tensor: Tensor) -> None:
        """Record the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        block = self._allocate(storage.nbytes())

        def release(_: Any) -> None:
            self.events.append((block, None))
            del self._known[key]

        self._known[key] = weakref.ref(storage, release)

    def _record_copies(self, *operands: Tensor | None) -> None:
        """Record the temporary copies of a convolution: the CPU kernel reorders operands that are not channels-last."""
        reordered = [t for t in operands if t is not None and not _is_channels_last(t)]
        blocks = [self._allocate(_size(tensor)) for tensor in reordered]
        self.events += [(block, None) for block in blocks]

    def _allocate(self, n_bytes: int) -> int:
        self._n_blocks += 1
        self.events.append((self._n_blocks, n_bytes))
        return self._n_blocks


def _record_step(twin: "Network", batch_size: int) -> list[Event]:
    """Run forward and backward of one training step; return the allocations and releases of its tensors."""
    n_objects = twin.n_objects or 1
    shape = (batch_size,) if n_objects == 1 else (batch_size, n_objects)
    labels = torch.zeros(shape, dtype=torch.int64, device="meta")
    recorder = AllocationRecorder()
    for tensor in (*twin.parameters(), *twin.buffers(), labels):
        recorder.ignore(tensor)
    with recorder:
        images = torch.empty(batch_size, *twin.spec.image, dtype=next(twin.parameters()).dtype, device="meta")
        output = twin(images, labels)
        targets = images if n_objects == 1 else images.unsqueeze(1).expand(-1, n_objects, -1, -1, -1)
        loss = twin.loss()(output, labels, targets)
        del output
        loss.backward()
        del loss, targets, images
    return recorder.events.copy()


def _replay_training(events: list[Event], parameters: list[int], buffers: list[int], n_states: int) -> int:
    """Replay two training steps in a heap; return the peak memory of the process in bytes."""
    heap = Heap()
    for size in [*parameters, *buffers]:
        heap.allocate(size)
    for step in range(2):
        gradients = heap.replay(events)
        if step == 0:
            for size in parameters:
                for _ in range(n_states):
                    heap.allocate(size)
        for size in parameters:  # the optimizer updates one parameter after the other, with a temporary of its size
            heap.free(heap.allocate(size))
        for block in gradients:  # the next step frees the gradients first
            heap.free(block)
    return heap.peak


def _peak_of_tensors(events: list[Event]) -> int:
    """Return the largest total size of the recorded blocks, without fragmentation."""
    sizes: dict[int, int] = {}
    current = peak = 0
    for block, size in events:
        if size is None:
            current -= sizes.pop(block)
        else:
            sizes[block] = size
            current += size
            peak = max(peak, current)
    return peak


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Heap of the C library ------------------------------------------------------------------------------------------

MIN_MAPPED_BYTES = 128 * 1024
MAX_MAP_THRESHOLD_BYTES = 32 * 2**20
ALIGNMENT_BYTES = 64
ALIGNMENT_SLACK_BYTES = 96  # an aligned block needs a hole that is larger than itself


class Heap:
    """Model of glibc's allocator: memory that a process holds after a sequence of allocations and releases.

    Large blocks are mapped and returned to the system when freed. Smaller ones come from a heap that shrinks only at
    its end, so a long-lived block keeps the holes below it. The threshold between the two is dynamic: after a mapped
    block of up to 32 MiB was freed, blocks up to its size come from the heap.

    >>> heap = Heap()
    >>> first, second = heap.allocate(100_000), heap.allocate(100_000)
    >>> heap.free(first)  # leaves a hole: the block above it is in use
    >>> heap.n_bytes
    200064
    """

    def __init__(self) -> None:
        self.peak = 0
        self._mapped = 0
        self._top = 0
        self._threshold = MIN_MAPPED_BYTES
        self._holes: list[tuple[int, int]] = []  # (start, size), sorted; adjacent holes are merged
        self._blocks: dict[int, tuple[int | None, int]] = {}  # (start or None if mapped, size)
        self._next = 0

    @property
    def n_bytes(self) -> int:
        """Number of bytes that the process currently occupies."""
        return self._mapped + self._top

    def allocate(self, size: int) -> int:
        """Allocate a block; return its identifier."""
        size = -(-max(size, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size >= self._threshold:
            start = None
            self._mapped += size
        else:
            start = self._find_start(size)
        self.peak = max(self.peak, self.n_bytes)
        self._next += 1
        self._blocks[self._next] = (start, size)
        return self._next

    def free(self, block: int) -> None:
        """Free a block."""
        start, size = self._blocks.pop(block)
        if start is None:
            self._mapped -= size
            if size <= MAX_MAP_THRESHOLD_BYTES:
                self._threshold = max(self._threshold, size)
            return
        self._add_hole(start, size)

    def replay(self, events: Iterable[Event]) -> list[int]:
        """Replay recorded allocations and releases; return the identifiers of the blocks that remain."""
        blocks: dict[int, int] = {}
        for name, size in events:
            if size is None:
                self.free(blocks.pop(name))
            else:
                blocks[name] = self.allocate(size)
        return list(blocks.values())

    def _find_start(self, size: int) -> int:
        """Return the address of a new block: the smallest hole that fits (best fit), otherwise the top."""
        fitting = [
            (hole[1], index) for index, hole in enumerate(self._holes) if hole[1] >= size + ALIGNMENT_SLACK_BYTES
        ]
        if not fitting:
            start, self._top = self._top, self._top + size
            return start
        _, index = min(fitting)
        start, hole_size = self._holes.pop(index)
        if hole_size > size:
            self._holes.insert(index, (start + size, hole_size - size))
        return start

    def _add_hole(self, start: int, size: int) -> None:
        """Add a hole, merge it with adjacent ones, and trim the top of the heap if it is large."""
        index = bisect.bisect(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            size, index = size + before, index - 1
        if start + size == self._top and size >= 2 * self._threshold:
            self._top = start
        else:
            self._holes.insert(index, (start, size))
