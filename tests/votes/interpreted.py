"""Triton kernels in its interpreter against the definitions in float64, values and gradients.

Run by `tests/votes/test_triton.py` in a process with TRITON_INTERPRET=1.
"""

import itertools
import os

import pytest
import torch
from torch import Tensor

from tests.sampling import covering_sample
from tests.tolerances import STREAMED, relative_rms
from tests.votes.fast_interpreter import accelerate
from torchcaps.votes import Wiring
from torchcaps.votes.dispatch import ChunkPlan
from torchcaps.votes.reductions import BY_NAME, Mix, Reduction
from torchcaps.votes.streaming import reduce_gradients, reduce_votes
from torchcaps.votes.triton import launch, support

assert os.environ.get("TRITON_INTERPRET") == "1"
accelerate()
KINDS = {name: kind for name, kind in BY_NAME.items() if kind is not Mix}
BFLOAT16 = 2e-2  # relative RMS: results are rounded to 8 bits, twice for some gradients

# Wiring, rows, columns, parents, columns of a vote, images.
LAYERS = {
    "dense_vector": (Wiring(3), 1, 3, 5, 4, 3),
    "dense_matrix": (Wiring(2), 3, 2, 3, 3, 2),
    "conv_matrix": (Wiring(1, (4, 3), (2, 2), (2, 1), (1, 0, 0, 0)), 2, 2, 3, 3, 2),
    "conv_vector": (Wiring(2, (3, 2), (3, 1), (1, 1), (0, 1, 0, 1)), 1, 3, 2, 2, 2),
    "conv_type": (Wiring(2, (2, 3), (2, 2), (1, 1), (1, 0, 0, 0), slot_kind="type"), 1, 3, 3, 4, 1),
}
BLOCKS = {  # sizes of tiles, fewest programs, most votes of a lane for one kernel of softmax and sum
    "one_block": (2048, 1, 4096),
    "small_blocks": (32, 12, 4096),
    "separate_softmax": (2048, 1, 1),
}
CASES = [
    case
    for case in itertools.product(KINDS, LAYERS, (False, True), (torch.float32, torch.bfloat16), BLOCKS)
    if case[4] != "separate_softmax" or case[0].startswith("Attend")
]


@pytest.mark.parametrize(
    ("name", "layer", "has_bias", "dtype", "blocks"),
    covering_sample(CASES, 10, [lambda c: c[0], lambda c: c[1:2], lambda c: (c[0][:6], c[4])], seed=1),
)
def test_kernels_equal_definitions(
    name: str, layer: str, has_bias: bool, dtype: torch.dtype, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile, n_programs, most = BLOCKS[blocks]
    monkeypatch.setattr(launch, "TILE_SIZE", tile)
    monkeypatch.setattr(launch, "MAX_COLUMNS", min(launch.MAX_COLUMNS, tile // 4))
    monkeypatch.setattr(launch, "MIN_PROGRAMS", n_programs)
    monkeypatch.setattr(launch, "MAX_ATTEND_SIZE", most)
    wiring, rows, columns, parents, outs, batch = LAYERS[layer]
    kind: type[Reduction] = KINDS[name]
    pose = torch.randn(batch, *(wiring.grid or ()), wiring.types, rows * columns)
    weight = torch.randn(wiring.n_slots, columns * wiring.children_per_slot, parents, outs)
    bias = torch.randn(wiring.n_slots, parents, rows * outs) if has_bias else None
    sizes = {True: (wiring.n_slots, parents), False: (parents, rows * outs)}
    arguments = [torch.randn(batch, *wiring.sites, *sizes[slotted]) for slotted in kind.slotted]
    inputs = [None if x is None else x.to(dtype) for x in (pose, weight, bias, *arguments)]
    exact = [None if x is None else x.double() for x in inputs]
    plan = ChunkPlan(wiring, rows)
    tolerance = STREAMED[torch.float32] if dtype is torch.float32 else BFLOAT16
    monkeypatch.setattr(support, "DEVICES", ("cpu",))
    with torch.no_grad():
        found, expected = reduce_votes(kind, plan, *inputs), reduce_votes(kind, plan, *exact)  # type: ignore[arg-type]
        assert found.dtype is dtype
        assert relative_rms(found, expected) < tolerance
        gradient = torch.randn_like(found)
        needs = (True,) * len(inputs)
        results = reduce_gradients(kind, plan, needs, gradient, *inputs)  # type: ignore[arg-type]
        references = reduce_gradients(kind, plan, needs, gradient.double(), *exact)  # type: ignore[arg-type]
    for actual, reference, tensor in zip(results, references, inputs, strict=True):
        assert (actual is None) == (tensor is None) or not getattr(kind, "through", True)
        if isinstance(actual, Tensor) and reference is not None:
            assert actual.dtype is dtype
            assert relative_rms(actual, reference) < tolerance


def test_shared_matrices_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that share one matrix are an expanded axis of the weights."""
    monkeypatch.setattr(support, "DEVICES", ("cpu",))
    pose, weight = torch.randn(2, 5, 3), torch.randn(1, 3, 2, 4).expand(5, -1, -1, -1)
    plan, coupling = ChunkPlan(Wiring(5), 1), torch.randn(2, 5, 2)
    assert launch._Layer(plan, pose, weight, None).weight.data_ptr() == weight.data_ptr()
    found = reduce_votes(KINDS["Sum"], plan, pose, weight, None, coupling)
    expected = reduce_votes(KINDS["Sum"], plan, pose.double(), weight.double(), None, coupling.double())
    assert relative_rms(found, expected) < STREAMED[torch.float32]
