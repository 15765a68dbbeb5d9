"""torch.compile, torch.export, state_dict, copies and the meta device: equal values, gradients of all parameters."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.cases import CASES, DEFAULT_CASES, SMALL_CASES, Case, gradients, over
from tests.sampling import all_cases
from tests.tolerances import SAME, assert_equal, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleStack, ConvCapsules, Decoder, DenseCapsules, PrimaryCapsules
from torchcaps.routing import InvertedAttention

CLOSE = SAME[torch.float64]
GRAPH_CASES = [c for c in SMALL_CASES if (c.geometry, c.pose) in {("dense", "vector"), ("conv_small", "matrix")}]
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@over(GRAPH_CASES, n=8, pairs=False, streamed={"stored": False, "streamed": True})
def test_compile_without_graph_breaks(case: Case, streamed: bool) -> None:
    layer, children = case.layer(streamed), case.children()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_rms(compiled(children).pose, layer(children).pose) < CLOSE
    expected, found = gradients(layer, children), gradients(compiled, children)
    for name, gradient in expected.items():
        assert relative_rms(found[f"_orig_mod.{name}" if f"_orig_mod.{name}" in found else name], gradient) < CLOSE


@over(GRAPH_CASES, n=8, pairs=False, seed=3, streamed={"stored": False, "streamed": True})
def test_export_with_dynamic_batch(case: Case, streamed: bool) -> None:
    layer, children = case.layer(streamed), case.children(batch=3)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, (children.pose,), dynamic_shapes=({0: batch},))
    for size in (1, 5):
        other = case.children(batch=size).pose
        assert relative_rms(program.module()(other).pose, layer(other).pose) < CLOSE


class EveryLayerKind(nn.Module):
    """A model of all layer kinds: primary, convolutional and dense capsules, a stack and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        routing = InvertedAttention(2)
        self.primary = PrimaryCapsules(1, 3, 4, kernel_size=3, stride=2, padding="same")
        self.stack = CapsuleStack(
            [
                ConvCapsules(3, 4, 3, 4, 3, 2, routing=routing, pose="matrix", streamed=True),
                DenseCapsules(12, 4, 5, 4, routing=routing, pose="matrix", streamed=False),
            ]
        )
        self.decoder = Decoder(5, 4, (1, 12, 12), hidden=(8,))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[Capsules, torch.Tensor]:
        capsules = self.stack(self.primary(images))
        return capsules, self.decoder(capsules, labels)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if all_cases() else ["aot_eager"])
def test_every_layer_kind_compiled(backend: str) -> None:
    """Inductor compiles for many seconds; without `--all-cases` it is tested with one layer, see test_streaming."""
    model = EveryLayerKind().double()
    images, labels = torch.rand(3, 1, 12, 12, dtype=torch.float64), torch.tensor([0, 4, 2])
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    losses = []
    for run in (model, compiled):
        model.zero_grad()
        capsules, decoded = run(images, labels)
        (capsules.pose.square().sum() + decoded.sum()).backward()
        losses.append((capsules.pose, decoded, *(p.grad.clone() for p in model.parameters())))  # type: ignore[union-attr]
    for found, expected in zip(losses[1], losses[0], strict=True):
        assert relative_rms(found, expected) < CLOSE


def test_every_layer_kind_exports_with_dynamic_batch() -> None:
    model = EveryLayerKind().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    example = (torch.rand(3, 1, 12, 12), torch.tensor([0, 4, 2]))
    program = torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: batch}))
    images, labels = torch.rand(7, 1, 12, 12), torch.randint(5, (7,))
    capsules, decoded = program.module()(images, labels)
    assert relative_rms(capsules.pose, model(images, labels)[0].pose) < SAME[torch.float32]
    assert relative_rms(decoded, model(images, labels)[1]) < SAME[torch.float32]


@over(CASES, n=80)
def test_state_deepcopy_and_pickle_round_trip(case: Case, tmp_path: Path) -> None:
    layer, children = case.layer(seed=0), case.children()
    expected = layer(children).pose
    assert_equal(copy.deepcopy(layer)(children).pose, expected)
    assert_equal(pickle.loads(pickle.dumps(layer))(children).pose, expected)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = case.layer(seed=9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(other(children).pose, expected)
    assert pickle.loads(pickle.dumps(case.routing)) == case.routing
    assert hash(copy.deepcopy(case.routing)) == hash(case.routing)


@over(CASES, n=120)
def test_every_parameter_receives_a_gradient(case: Case) -> None:
    layer, children = case.layer(), case.children()
    for name, gradient in gradients(layer, children).items():
        if not name.startswith("children."):
            assert float(gradient.abs().max()) > 0, name


@over(DEFAULT_CASES)
def test_forward_sets_no_attributes(case: Case) -> None:
    layer, children = case.layer(), case.children()
    before = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    layer(children)
    assert {name: value for name, value in vars(layer).items() if not name.startswith("_")} == before


@STREAMED
@over(DEFAULT_CASES)
def test_meta_device_and_empty_batch(case: Case, streamed: bool) -> None:
    """Output shapes on the meta device, and for a batch without images."""
    layer, children = case.layer(streamed), case.children()
    expected = layer(children).pose.shape
    meta = Capsules(*(tensor.to("meta") for tensor in children))
    assert layer.to("meta")(meta).pose.shape == expected
    empty = Capsules(*(tensor[:0].clone().requires_grad_() for tensor in children))
    parents = case.layer(streamed)(empty).pose
    assert parents.shape == (0, *expected[1:])
    parents.sum().backward()
