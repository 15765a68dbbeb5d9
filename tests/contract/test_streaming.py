"""Votes that are streamed equal votes that are stored, and really are not stored."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract.cases import CASES, Case, gradients, over
from tests.tolerances import STREAMED, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import KERNEL_BYTES, KERNEL_LANES, STORED_BYTES
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Routing
from torchcaps.votes import DenseVotes, StreamedVotes, Wiring, cpu
from torchcaps.votes import dispatch as plan
from torchcaps.votes.cpu import library
from torchcaps.votes.custom_ops import encode
from torchcaps.votes.reductions import BY_NAME

WAYS = {
    "one_slot_pieces": torch.float64,
    "large_pieces": torch.float64,
    "pieces_float32": torch.float32,
    "kernel": torch.float64,
    "kernel_float32": torch.float32,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The ways to votes that are not stored: the two ends of how torch cuts them, and the compiled kernel."""
    dtype = WAYS[request.param]
    if request.param.startswith("kernel"):
        assert library(dtype) is not None, "there is no C++ compiler here: the kernel can't be tested"
        monkeypatch.setattr(cpu.kernel, "WORTH_A_THREAD", 1)  # small as they are, in threads
        monkeypatch.setattr(cpu.kernel, "MOST_LANES", 16)  # and in chunks
    else:
        monkeypatch.setattr(cpu.kernel, "library", lambda _: None)
        monkeypatch.setattr(plan, "PIECE_BYTES", 1 if request.param == "one_slot_pieces" else 2**40)
    return dtype


@over(CASES)
def test_streamed_equals_stored(case: Case, way: torch.dtype) -> None:
    """Against the definition in float64, with the same numbers: rounding is then that of the one way alone. Where
    float32 itself bends a gradient by more than the limit, it may be twice what the stored way is bent by.
    """
    children, stream = case.children(way), case.layer(True, way)
    whole, stored = Capsules(*(x.double() for x in children)), case.layer(False, way).double()
    assert isinstance(stored.votes(whole), DenseVotes)
    assert isinstance(stream.votes(children), StreamedVotes)
    limit = STREAMED[way]
    expected, found = stored(whole), stream(children)
    assert relative_rms(found.pose, expected.pose) < limit
    if expected.activation is not None:
        assert relative_rms(found.activation, expected.activation) < limit
    assert relative_rms(stream.votes(children).dense(), stored.votes(whole).dense()) < limit
    expected_gradients, found_gradients = gradients(stored, whole), gradients(stream, children)
    rounded = gradients(case.layer(False, way), children)
    largest = max(float(g.abs().max()) for g in expected_gradients.values())
    for name, expected_gradient in expected_gradients.items():
        if float(expected_gradient.abs().max()) < 1e-9 * largest:  # zero but for rounding: nothing to be relative to
            assert float(found_gradients[name].abs().max()) < limit * largest, name
        else:
            bent = relative_rms(rounded[name], expected_gradient)
            assert relative_rms(found_gradients[name], expected_gradient) < max(limit, 2 * bent), name


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_the_number_of_threads_changes_nothing_but_rounding(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.kernel, "WORTH_A_THREAD", 1)
    found = []
    before = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(gradients(case.layer(True, torch.float32), case.children(torch.float32)))
    torch.set_num_threads(before)
    for name, expected in found[0].items():
        if float(expected.abs().max()) > 0:
            assert relative_rms(found[1][name], expected) < STREAMED[torch.float32], name


@pytest.mark.parametrize("batch", [16, 33])
def test_windows_beyond_a_grid_of_one_place_read_zeros(batch: int) -> None:
    """All lanes in use, and most of every window outside: nothing of what was in memory before may be read."""
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


def test_what_is_no_plain_tensor_of_one_device_is_left_to_torch() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing="dynamic", streamed=True, init=1.0)
    pose = torch.randn(20, 6, 4)
    for odd in (torch._neg_view(pose), pose.to_sparse().to_dense()):
        expected = DenseVotes.make(odd, layer.weight, None, 1, layer.routing.wire(6)).sum(torch.ones(20, 6, 3))
        found = StreamedVotes(odd, layer.weight, None, 1, layer.routing.wire(6)).sum(torch.ones(20, 6, 3).clone())
        assert relative_rms(found, expected) < STREAMED[torch.float32]
    with pytest.raises(RuntimeError, match="meta"):
        layer.to("meta")(pose)


def test_without_a_compiler_the_plain_way_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, one that fails, one that is switched off, a cache that can't be written: never an error."""
    script = (
        "import torch; from torchcaps.nn import DenseCapsules; from torchcaps.votes.cpu import library;"
        "layer = DenseCapsules(16, 8, 10, 16, routing='dynamic', streamed=True);"
        "print(tuple(layer(torch.randn(2, 16, 8)).pose.shape), library(torch.float32) is not None)"
    )
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'kernel.cpp:1: error: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").write_text("no program")
    (tmp_path / "odd").chmod(0o755)
    for changes, kernel, said in (
        ({"TORCHCAPS_KERNEL": "0"}, False, ""),
        ({"CXX": str(broken), "XDG_CACHE_HOME": str(tmp_path / "one")}, False, "a slower way is taken: "),
        ({"CXX": str(broken), "XDG_CACHE_HOME": str(tmp_path / "one")}, False, ""),  # remembered
        ({"CXX": str(tmp_path / "odd"), "XDG_CACHE_HOME": str(tmp_path / "two")}, False, "can't be run"),
        ({"XDG_CACHE_HOME": str(tmp_path / "file")}, True, "compiling a kernel"),
    ):
        environment = {**os.environ, "TMPDIR": str(tmp_path), **changes}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.stdout.split(") ") == ["(2, 10, 16", f"{kernel}\n"], done.stderr
        assert (said in done.stderr) if said else not done.stderr
    assert not list(tmp_path.glob("**/.making-*"))


def saved_bytes(layer: torch.nn.Module, children: Capsules) -> int:
    """The bytes that autograd keeps between the two passes, each piece of memory counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parents = layer(children)  # held until the count is done, so that no address is used twice
    assert parents.pose.requires_grad
    return sum(kept.values())


def tsai_cifar100_layer(routing: InvertedAttention, streamed: bool = True) -> ConvCapsules:
    """The first convolutional capsule layer of Tsai 2020 on CIFAR-100: 16x16 -> 7x7, 32 -> 32 types of 6x6."""
    return ConvCapsules(32, 36, 32, 36, 3, 2, routing=routing, pose="matrix", streamed=streamed)


def tsai_cifar100_children(batch: int) -> Capsules:
    return Capsules(torch.randn(batch, 16, 16, 32, 36, requires_grad=True))


def test_the_cifar100_layer_of_tsai_keeps_under_half_a_gibibyte() -> None:
    layer = tsai_cifar100_layer(InvertedAttention(2))
    one, two, three = (saved_bytes(layer, tsai_cifar100_children(batch)) for batch in (1, 2, 3))
    an_image = two - one
    assert abs((three - two) - an_image) < 1e-3 * an_image  # linear in the batch, so 128 can be told from 1 and 2
    votes = 128 * 49 * 288 * 32 * 36 * 4
    assert 7.7 * 2**30 < votes < 7.8 * 2**30
    at_128 = one + 127 * an_image
    assert at_128 < 0.5 * 2**30
    # Children and a few sets of parents; no couplings, and nothing of the votes' size.
    children, parents = 256 * 32 * 36 * 4, 49 * 32 * 36 * 4
    assert children <= an_image <= children + 4 * parents
    assert at_128 < 0.3 * 2**30


def test_storing_votes_would_not_pass_that_test() -> None:
    """The counter does see votes where they are kept."""
    stored = tsai_cifar100_layer(InvertedAttention(2), streamed=False)
    assert saved_bytes(stored, tsai_cifar100_children(1)) > 49 * 288 * 32 * 36 * 4


@pytest.mark.parametrize("routing", [Dynamic(3), EM(2), InvertedAttention(2)], ids=lambda r: r.name())
def test_what_is_kept_grows_with_children_and_couplings_not_with_votes(routing: Routing) -> None:
    """Four times the pose size is four times the votes. Couplings stay; children and parents grow by right."""
    kept, children, parents, votes = [], [], [], []
    for dim in (16, 64):
        layer = ConvCapsules(32, dim, 16, dim, 3, routing=routing, pose="matrix", streamed=True)
        capsules = Capsules(torch.randn(1, 6, 6, 32, dim, requires_grad=True))
        kept.append(saved_bytes(layer, capsules) - 4 * sum(p.numel() for p in layer.parameters()))
        children.append(4 * capsules.pose.numel())
        parents.append(4 * 16 * 16 * dim)
        votes.append(288 * parents[-1])
    grown = kept[1] - kept[0]
    assert grown <= (children[1] - children[0]) + 12 * (parents[1] - parents[0])
    assert grown < 0.06 * (votes[1] - votes[0])


def test_the_gradient_of_the_last_iteration_keeps_the_same_for_any_number() -> None:
    def kept(iterations: int) -> int:
        layer = ConvCapsules(4, 16, 8, 16, 3, routing=Dynamic(iterations, gradient="last"), streamed=True)
        return saved_bytes(layer, Capsules(torch.randn(2, 8, 8, 4, 16, requires_grad=True)))

    assert kept(2) == kept(5)


def test_auto_stores_small_votes_and_streams_large_ones() -> None:
    layer = ConvCapsules(4, 16, 8, 16, 3, routing="dynamic")
    an_image = 36 * 36 * 8 * 16 * 4  # bytes: places, slots, parents, numbers
    for kernel, most in ((True, KERNEL_BYTES), (False, STORED_BYTES)):
        with pytest.MonkeyPatch.context() as patch:
            if not kernel:
                patch.setattr(cpu.kernel, "library", lambda _: None)
            for grid in (4, 8):  # 4 and 36 places
                votes = layer.votes(torch.zeros(1, grid, grid, 4, 16))
                size = an_image * (grid - 2) ** 2 // 36
                assert isinstance(votes, StreamedVotes) == (size > most)
            n_images = most // an_image + 1
            assert isinstance(layer.votes(torch.zeros(n_images, 8, 8, 4, 16)), StreamedVotes)
    few = DenseCapsules(2048, 8, 10, 16, routing="dynamic")  # a lane for each of 7 images: most of a register is empty
    assert isinstance(few.votes(torch.zeros(KERNEL_LANES - 1, 2048, 8)), DenseVotes)
    assert isinstance(few.votes(torch.zeros(KERNEL_LANES, 2048, 8)), StreamedVotes)


@pytest.mark.parametrize("routing", [EM(2), Attention()], ids=lambda r: r.name())
def test_streamed_votes_can_be_differentiated_twice(routing: Routing) -> None:
    def second(streamed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = ConvCapsules(2, 4, 3, 4, 2, routing=routing, pose="matrix", streamed=streamed).double().eval()
        pose = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(layer(pose).pose.square().sum(), pose, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [pose, layer.weight]))

    for found, expected in zip(second(True), second(False), strict=True):
        assert relative_rms(found, expected) < STREAMED[torch.float64]


def test_streamed_attention_runs_under_inductor() -> None:
    """Its mixed logits come out of the operator in another order of memory than the others' results."""
    torch.compiler.reset()
    layer = ConvCapsules(3, 4, 2, 5, 3, routing=Attention(), streamed=True).double().eval()
    pose = torch.randn(2, 5, 5, 3, 4, dtype=torch.float64)
    found = torch.compile(layer, fullgraph=True)(pose).pose
    assert relative_rms(found, layer(pose).pose) < STREAMED[torch.float64]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_does_not_store_votes_either(backend: str) -> None:
    """A layer of a paper's size, in one graph: what is kept stays that of the plain layer."""
    torch.compiler.reset()
    layer = tsai_cifar100_layer(InvertedAttention(2))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    children = tsai_cifar100_children(1)
    assert saved_bytes(compiled, children) < 1.3 * saved_bytes(layer, children)
    assert relative_rms(compiled(children).pose, layer(children).pose) < STREAMED[torch.float32]


def test_functional_gradients_go_through_streamed_votes() -> None:
    layer = ConvCapsules(2, 4, 3, 4, 2, routing="dynamic", streamed=True).double()
    pose = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64)
    found = torch.func.grad(lambda x: layer(x).pose.sum())(pose)
    pose.requires_grad_()
    expected = torch.autograd.grad(layer(pose).pose.sum(), pose)[0]
    assert relative_rms(found, expected) < STREAMED[torch.float64]  # the one by torch, the other by the kernel


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("shared", [False, True], ids=["own_matrices", "shared_matrices_and_bias"])  # the kernel's
def test_the_operator_of_compiled_graphs_keeps_its_promises(kind: str, shared: bool) -> None:
    """Schema, shapes and strides of its fake kernels, and its gradients, by torch's own checker."""
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
    sizes = encode(plan.Plan(wiring, 1))
    torch.library.opcheck(torch.ops.torchcaps.reduce_votes.default, (kind, sizes, pose, weight, bias, arguments))
    with torch.no_grad():
        found = torch.ops.torchcaps.reduce_votes(kind, sizes, pose, weight, bias, arguments)
        gradient = torch.randn_like(found)
    backward = (kind, sizes, gradient, pose.detach(), weight.detach(), bias, [a.detach() for a in arguments])
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.torchcaps.reduce_votes_backward.default, backward, test_utils=names)
