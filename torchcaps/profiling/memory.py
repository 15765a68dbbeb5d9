"""What training a model takes of memory, told before anything runs.

A training step of the model's twin runs on the meta device, where tensors have shapes but no numbers. Every tensor is
noted at its birth and its death, and a model of the C library's heap is led through these births and deaths twice.
"""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchcaps.nn.layers import CapsuleLayer
from torchcaps.nn.sizes import as_count
from torchcaps.profiling.heap import Heap
from torchcaps.profiling.summary import Summary, summarize
from torchcaps.profiling.twin import meta_twin

if TYPE_CHECKING:
    from torchcaps.models.network import Network

__all__ = ["TrainingMemory", "estimate_memory", "streaming_layers"]


# What the kernels take for themselves, and holes that the model of the heap does not see; votes streamed by torch leave
# more of those. `python -m benchmarks.training_memory` measures what they lead to.
SPARE, SPARE_STREAMED = 1.15, 1.3


@dataclass(frozen=True)
class TrainingMemory:
    """The bytes that training takes at its highest.

    Args:
        weights: parameters and buffers.
        optimizer: what it keeps beside them.
        step: the most that tensors take at once in a step: the batch, what backward keeps, gradients.
        total: what the process holds for all of these, with the holes in its heap and something to spare.
        votes: all vote tensors of the batch, were they stored.
    """

    weights: int
    optimizer: int
    step: int
    total: int
    votes: int


class Births(TorchDispatchMode):
    """Notes every tensor that is made while it is on: (number, bytes) at its birth, (number, None) at its death."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int | None]] = []
        self._n_seen = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        if func is torch.ops.aten.convolution.default:
            self._copy(args[0], args[1], result)
        elif func is torch.ops.aten.convolution_backward.default:
            gradient, images, weight = args[:3]
            self._copy(gradient, weight, result[0])
            self._copy(gradient, images, result[1])
        return result

    def _copy(self, *operands: Tensor | None) -> None:
        """Note what a convolution's kernel copies: on the CPU it takes images that are channels last as they are, and
        wants all else in a layout of its own.
        """
        other = [t for t in operands if t is not None and not _is_channels_last(t)]
        copies = [self._birth(_bytes(tensor)) for tensor in other]
        self.events += [(number, None) for number in copies]

    def _birth(self, size: int) -> int:
        self._n_seen += 1
        self.events.append((self._n_seen, size))
        return self._n_seen

    def see(self, tensor: Tensor) -> None:
        """Note a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        number = self._birth(storage.nbytes())

        def forget(_: Any) -> None:
            self.events.append((number, None))
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a tensor that was there before."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage)


def estimate_memory(model: "Network", batch: int, streamed: bool | Literal["auto"] | None = None) -> TrainingMemory:
    """Return what training takes with batches of this size, with the optimiser of the model's recipe.

    It is that of the CPU; an accelerator's own copies and workspaces are another matter.

    Args:
        model: on any device, the meta device included.
        batch: images in a batch.
        streamed: how its capsule layers keep votes; by default as they are set.
    """
    as_count(batch, "batch")
    twin = meta_twin(model).train()
    for layer in twin.modules():
        if isinstance(layer, CapsuleLayer) and streamed is not None:
            layer.streamed = streamed
    births = _run_step(twin, batch)
    parameters = [_bytes(parameter) for parameter in twin.parameters()]
    n_states = model.recipe.optimizer.n_states
    heap = Heap()
    for size in [*parameters, *map(_bytes, twin.buffers())]:
        heap.take(size)
    for step in range(2):
        left = heap.replay(births)  # the gradients, which the next step drops at its start
        if step == 0:
            for size in parameters:
                for _ in range(n_states):
                    heap.take(size)
        for size in parameters:  # the optimiser goes from one to the next, with a temporary of its size
            heap.give_back(heap.take(size))
        for number in left:
            heap.give_back(number)
    summary = summarize(twin)
    layers = dict(_capsule_layers(twin))
    in_pieces = any(not layers[name].has_kernel() for name in streaming_layers(twin, summary, batch))
    spare = SPARE_STREAMED if in_pieces else SPARE
    weights, kept = sum(parameters) + sum(map(_bytes, twin.buffers())), n_states * sum(parameters)
    return TrainingMemory(
        weights=weights,
        optimizer=kept,
        step=_most_at_once(births),
        total=weights + kept + int(spare * (heap.most - weights - kept)),
        votes=summary.votes * batch * next(twin.parameters()).element_size(),
    )


def streaming_layers(model: "Network", summary: Summary, batch: int) -> list[str]:
    """Return the names of the capsule layers that stream their votes at this batch, as they are set."""
    size = batch * next(model.parameters()).element_size()
    rows = {row.name: row for row in summary.rows}
    found = []
    for name, layer in _capsule_layers(model):
        lanes = batch * math.prod(rows[name].output[:-2])
        if layer.streams(rows[name].votes * size, lanes):
            found.append(name)
    return found


def _capsule_layers(model: "Network") -> Iterator[tuple[str, CapsuleLayer]]:
    for name, layer in model.named_modules():
        if isinstance(layer, CapsuleLayer):
            yield name.split(".")[-1], layer


def _run_step(twin: "Network", batch: int) -> list[tuple[int, int | None]]:
    """Run a step, forward and backward; return the births and deaths of its tensors."""
    n_objects = twin.n_objects or 1
    labels = torch.zeros((batch,) if n_objects == 1 else (batch, n_objects), dtype=torch.int64, device="meta")
    births = Births()
    for tensor in (*twin.parameters(), *twin.buffers(), labels):
        births.ignore(tensor)
    with births:
        images = torch.empty(batch, *twin.spec.image, dtype=next(twin.parameters()).dtype, device="meta")
        output = twin(images, labels)
        targets = images if n_objects == 1 else images.unsqueeze(1).expand(-1, n_objects, -1, -1, -1)
        loss = twin.loss()(output, labels, targets)
        del output
        loss.backward()
        del loss, targets, images
    return births.events.copy()


def _most_at_once(events: list[tuple[int, int | None]]) -> int:
    sizes: dict[int, int] = {}
    now = most = 0
    for number, size in events:
        if size is None:
            now -= sizes.pop(number)
        else:
            sizes[number] = size
            now += size
            most = max(most, now)
    return most


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
