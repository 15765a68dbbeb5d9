"""Streamed votes equal stored votes, values and gradients, and are not stored."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.contract.cases import CASES, Case, gradients, over
from tests.sampling import all_cases, covering_sample
from tests.tolerances import STREAMED, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Routing
from torchcaps.votes import DenseVotes, StreamedVotes, Wiring, dispatch
from torchcaps.votes.cpu import build
from torchcaps.votes.custom_ops import encode_plan
from torchcaps.votes.reductions import BY_NAME
from torchcaps.votes.triton import support

PATHS = {name: name for name in ("one_slot_chunks", "large_chunks", "chunks_float32", "kernel", "kernel_float32")}
STREAMED_CASES, N_STREAMED = CASES, 280
if os.environ.get("TRITON_INTERPRET") == "1":  # in a process of tests/votes/test_triton.py
    from tests.votes.fast_interpreter import accelerate

    accelerate()
    PATHS = {"triton_float32": "triton_float32"}
    shard, n_shards = map(int, os.environ["TORCHCAPS_TEST_SHARD"].split("/"))
    STREAMED_CASES = covering_sample(CASES[shard::n_shards], 4, ["geometry", "pose"], seed=2)
    N_STREAMED = None


@contextmanager
def streaming_path(name: str) -> Iterator[torch.dtype]:
    """Force a streamed path: torch with the smallest or the largest chunks, or a kernel; yield the dtype to use."""
    dtype = torch.float32 if name.endswith("float32") else torch.float64
    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("triton"):
            patch.setattr(support, "DEVICES", ("cpu",))
        elif name.startswith("kernel"):
            assert build.load_library(dtype) is not None, "the kernel can't be tested without a C++ compiler"
            patch.setattr(dispatch, "MIN_THREAD_WORK", 1)  # several threads
            patch.setattr(dispatch, "MAX_CHUNK_LANES", 16)  # and chunks, small as the layers are
        else:
            patch.setattr(dispatch, "has_kernel", lambda dtype: False)
            patch.setattr(dispatch, "CHUNK_BYTES", 1 if name == "one_slot_chunks" else 2**40)
        yield dtype


@over(STREAMED_CASES, n=N_STREAMED, path=PATHS)
def test_streamed_equals_stored(case: Case, path: str) -> None:
    """Compare with stored votes in float64 on the same values, so that only the rounding of the streamed path counts.

    If float32 itself distorts a gradient by more than the tolerance, twice the error of the stored path is accepted.
    """
    with streaming_path(path) as dtype:
        children, streamed = case.children(dtype), case.layer(True, dtype)
        children64, stored = Capsules(*(x.double() for x in children)), case.layer(False, dtype).double()
        assert isinstance(stored.votes(children64), DenseVotes)
        assert isinstance(streamed.votes(children), StreamedVotes)
        tolerance = STREAMED[dtype]
        expected, actual = stored(children64), streamed(children)
        assert relative_rms(actual.pose, expected.pose) < tolerance
        if expected.activation is not None:
            assert relative_rms(actual.activation, expected.activation) < tolerance
        assert relative_rms(streamed.votes(children).dense(), stored.votes(children64).dense()) < tolerance
        expected_grads, actual_grads = gradients(stored, children64), gradients(streamed, children)
        rounded = gradients(case.layer(False, dtype), children)
        largest = max(float(g.abs().max()) for g in expected_grads.values())
        for name, expected_grad in expected_grads.items():
            if float(expected_grad.abs().max()) < 1e-9 * largest:  # zero up to rounding: no relative error
                assert float(actual_grads[name].abs().max()) < tolerance * largest, name
            else:
                rounding = relative_rms(rounded[name], expected_grad)
                assert relative_rms(actual_grads[name], expected_grad) < max(tolerance, 2 * rounding), name


@over(CASES[::7], n=20)
def test_number_of_threads_changes_only_rounding(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MIN_THREAD_WORK", 1)
    results = []
    before = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(gradients(case.layer(True, torch.float32), case.children(torch.float32)))
    torch.set_num_threads(before)
    for name, expected in results[0].items():
        if float(expected.abs().max()) > 0:
            assert relative_rms(results[1][name], expected) < STREAMED[torch.float32], name


@pytest.mark.parametrize("batch", [16, 33])
def test_padding_of_a_grid_of_one_position_reads_zeros(batch: int) -> None:
    """All lanes are used and most of every window is padding: no uninitialised memory may be read."""
    torch.manual_seed(0)
    layer = ConvCapsules(4, 16, 3, 16, 3, 1, 1, routing="inverted_attention", pose="matrix")
    pose = torch.randn(batch, 1, 1, 4, 16)
    found = []
    for layer.streamed in (False, True):
        leaf = pose.clone().requires_grad_()
        parents = layer(leaf).pose
        found.append([parents, *torch.autograd.grad(parents.sum() + parents[..., 0].sum(), [leaf, layer.weight])])
    for stored, streamed in zip(*found, strict=True):
        assert relative_rms(streamed, stored) < STREAMED[torch.float32]


def test_tensors_that_the_kernel_does_not_support_are_computed_by_torch() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing="dynamic", streamed=True, init=1.0)
    pose = torch.randn(20, 6, 4)
    for odd in (torch._neg_view(pose), pose.to_sparse().to_dense()):
        expected = DenseVotes.make(odd, layer.weight, None, 1, layer.routing.wire(6)).sum(torch.ones(20, 6, 3))
        found = StreamedVotes(odd, layer.weight, None, 1, layer.routing.wire(6)).sum(torch.ones(20, 6, 3).clone())
        assert relative_rms(found, expected) < STREAMED[torch.float32]
    with pytest.raises(RuntimeError, match="meta"):
        layer.to("meta")(pose)


def saved_bytes(layer: torch.nn.Module, children: Capsules) -> int:
    """Return the bytes that autograd saves for backward, each storage counted once."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parents = layer(children)  # alive until the count is done, so that no address is reused
    assert parents.pose.requires_grad
    return sum(saved.values())


def tsai_cifar100_layer(routing: InvertedAttention, streamed: bool = True) -> ConvCapsules:
    """Return the first convolutional capsule layer of Tsai 2020 on CIFAR-100: 16x16 -> 7x7, 32 -> 32 types of 6x6."""
    return ConvCapsules(32, 36, 32, 36, 3, 2, routing=routing, pose="matrix", streamed=streamed)


def tsai_cifar100_children(batch: int) -> Capsules:
    return Capsules(torch.randn(batch, 16, 16, 32, 36, requires_grad=True))


def test_cifar100_layer_of_tsai_saves_under_half_a_gibibyte() -> None:
    layer = tsai_cifar100_layer(InvertedAttention(2))
    one, two, three = (saved_bytes(layer, tsai_cifar100_children(batch)) for batch in (1, 2, 3))
    per_image = two - one
    assert abs((three - two) - per_image) < 1e-3 * per_image  # linear in the batch: extrapolate to 128
    votes = 128 * 49 * 288 * 32 * 36 * 4
    assert 7.7 * 2**30 < votes < 7.8 * 2**30
    at_128 = one + 127 * per_image
    assert at_128 < 0.5 * 2**30
    # Children and a few sets of parents; no couplings, and nothing of the size of the votes.
    children, parents = 256 * 32 * 36 * 4, 49 * 32 * 36 * 4
    assert children <= per_image <= children + 4 * parents
    assert at_128 < 0.3 * 2**30


def test_saved_bytes_include_stored_votes() -> None:
    """Control: the counter of the test above sees votes that are stored."""
    stored = tsai_cifar100_layer(InvertedAttention(2), streamed=False)
    assert saved_bytes(stored, tsai_cifar100_children(1)) > 49 * 288 * 32 * 36 * 4


@pytest.mark.parametrize("routing", [Dynamic(3), EM(2), InvertedAttention(2)], ids=lambda r: r.name())
def test_saved_bytes_grow_with_children_and_parents_not_with_votes(routing: Routing) -> None:
    """Four times the pose size means four times the votes, children and parents, and equal couplings."""
    saved, children, parents, votes = [], [], [], []
    for dim in (16, 64):
        layer = ConvCapsules(32, dim, 16, dim, 3, routing=routing, pose="matrix", streamed=True)
        capsules = Capsules(torch.randn(1, 6, 6, 32, dim, requires_grad=True))
        saved.append(saved_bytes(layer, capsules) - 4 * sum(p.numel() for p in layer.parameters()))
        children.append(4 * capsules.pose.numel())
        parents.append(4 * 16 * 16 * dim)
        votes.append(288 * parents[-1])
    growth = saved[1] - saved[0]
    assert growth <= (children[1] - children[0]) + 12 * (parents[1] - parents[0])
    assert growth < 0.06 * (votes[1] - votes[0])


def test_gradient_of_the_last_iteration_saves_the_same_for_any_number_of_iterations() -> None:
    def saved(iterations: int) -> int:
        layer = ConvCapsules(4, 16, 8, 16, 3, routing=Dynamic(iterations, gradient="last"), streamed=True)
        return saved_bytes(layer, Capsules(torch.randn(2, 8, 8, 4, 16, requires_grad=True)))

    assert saved(2) == saved(5)


@pytest.mark.parametrize("routing", [EM(2), Attention()], ids=lambda r: r.name())
def test_streamed_votes_can_be_differentiated_twice(routing: Routing) -> None:
    def second(streamed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = ConvCapsules(2, 4, 3, 4, 2, routing=routing, pose="matrix", streamed=streamed).double().eval()
        pose = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(layer(pose).pose.square().sum(), pose, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [pose, layer.weight]))

    for streamed, stored in zip(second(True), second(False), strict=True):
        assert relative_rms(streamed, stored) < STREAMED[torch.float64]


def test_streamed_attention_runs_under_inductor() -> None:
    """The operator returns its mixed logits in another memory order than other results."""
    torch.compiler.reset()
    layer = ConvCapsules(3, 4, 2, 5, 3, routing=Attention(), streamed=True).double().eval()
    pose = torch.randn(2, 5, 5, 3, 4, dtype=torch.float64)
    found = torch.compile(layer, fullgraph=True)(pose).pose
    assert relative_rms(found, layer(pose).pose) < STREAMED[torch.float64]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if all_cases() else ["aot_eager"])
def test_compiled_layer_does_not_store_votes(backend: str) -> None:
    """A layer of a paper's size saves about as much in a compiled graph as in eager mode, with equal gradients."""
    torch.compiler.reset()
    layer = tsai_cifar100_layer(InvertedAttention(2))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    children = tsai_cifar100_children(1)
    assert saved_bytes(compiled, children) < 1.3 * saved_bytes(layer, children)
    found, expected = compiled(children).pose, layer(children).pose
    assert relative_rms(found, expected) < STREAMED[torch.float32]
    leaves = [children.pose, layer.weight]
    results = (torch.autograd.grad(pose.sum() + pose[..., 0].sum(), leaves) for pose in (found, expected))
    for gradient, expected_gradient in zip(*results, strict=True):
        assert relative_rms(gradient, expected_gradient) < STREAMED[torch.float32]


def test_functional_gradients_of_streamed_votes() -> None:
    layer = ConvCapsules(2, 4, 3, 4, 2, routing="dynamic", streamed=True).double()
    pose = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64)
    found = torch.func.grad(lambda x: layer(x).pose.sum())(pose)
    pose.requires_grad_()
    expected = torch.autograd.grad(layer(pose).pose.sum(), pose)[0]
    assert relative_rms(found, expected) < STREAMED[torch.float64]  # by torch and by the kernel


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("shared", [False, True], ids=["matrices_per_position", "shared_matrices_and_bias"])
def test_custom_operator_passes_opcheck(kind: str, shared: bool) -> None:
    """Schema, shapes and strides of the fake implementation, and gradients; shared matrices use the kernel."""
    wiring = Wiring(1, (5, 5), (3, 3), (1, 1), (1, 0, 0, 0))
    pose = torch.randn(2, 5, 5, 1, 4, requires_grad=True)
    weight = torch.randn(*(() if shared else wiring.sites), 9, 4, 3, 4, requires_grad=True)
    bias = torch.randn(9, 3, 4, requires_grad=True) if shared else None
    by_pair = torch.randn(2, *wiring.sites, 9, 3, requires_grad=True)
    by_parent = torch.randn(2, *wiring.sites, 3, 4, requires_grad=True)
    kernel = torch.randn(3, 9, 9, 4, requires_grad=True)
    arguments = {
        "Sum": [by_pair],
        "Dot": [by_parent],
        "SqSum": [by_pair, by_parent],
        "SqDist": [by_parent, by_parent.detach().clone().requires_grad_()],
        "Mix": [kernel],
    }.get(kind, [by_parent])
    sizes = encode_plan(dispatch.ChunkPlan(wiring, 1))
    torch.library.opcheck(torch.ops.torchcaps.reduce_votes.default, (kind, sizes, pose, weight, bias, arguments))
    with torch.no_grad():
        found = torch.ops.torchcaps.reduce_votes(kind, sizes, pose, weight, bias, arguments)
        gradient = torch.randn_like(found)
    needs = [True] * (3 + len(arguments))
    backward = (kind, sizes, needs, gradient, pose.detach(), weight.detach(), bias, [a.detach() for a in arguments])
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.torchcaps.reduce_votes_backward.default, backward, test_utils=names)
