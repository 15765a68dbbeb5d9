"""The kernel with registers of every width that this processor has: each compiles to other tiles and other vectors."""

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tolerances import SAME, relative_rms
from torchcaps import Capsules
from torchcaps.nn import CapsuleLayer, ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Dynamic, InvertedAttention, Routing
from torchcaps.votes.cpu import build

CLOSE = SAME[torch.float64]
WIDTHS = {"sse2": ("-march=x86-64",), "avx2": ("-march=x86-64", "-mavx2", "-mfma")}


def has(feature: str) -> bool:
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    return platform.machine() == "x86_64" and compiler and feature in build._processor().split()


@pytest.fixture
def narrow_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A kernel for narrower registers than this processor's, compiled in haste and kept nowhere."""
    kept = tuple(flag for flag in build.FLAGS if flag not in ("-O3", "-march=native"))
    monkeypatch.setattr(build, "FLAGS", ("-O1", *WIDTHS[request.param], *kept))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def layers(routing: Routing, pose: str, dim: int, streamed: bool) -> list[CapsuleLayer]:
    return [
        DenseCapsules(7, dim, 5, dim, routing=routing, pose=pose, streamed=streamed),  # type: ignore[arg-type]
        ConvCapsules(3, dim, 5, dim, 3, 2, 1, routing=routing, pose=pose, streamed=streamed),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    "narrow_kernel",
    [pytest.param(name, marks=pytest.mark.skipif(not has(name), reason="not this processor's")) for name in WIDTHS],
    indirect=True,
)
@pytest.mark.usefixtures("narrow_kernel")
def test_narrow_registers_give_the_same_values_and_gradients() -> None:
    """Tiles that fill the registers, and what is left over: 16 and 9 numbers as matrices, 8 and 5 as vectors."""
    assert build.library(torch.float64) is not None
    generator = torch.Generator().manual_seed(0)
    for routing in (Dynamic(3), Dynamic(2, leak=True), InvertedAttention(2), EM(2)):
        for pose, dim in (("matrix", 16), ("vector", 8), ("matrix", 9), ("vector", 5)):
            torch.manual_seed(0)
            pairs = zip(layers(routing, pose, dim, True), layers(routing, pose, dim, False), strict=True)
            for (ours, plain), shape in zip(pairs, ((37, 7), (3, 6, 5, 3)), strict=True):
                plain.load_state_dict(ours.state_dict())
                children = torch.randn(*shape, dim, generator=generator, dtype=torch.float64)
                active = (
                    torch.rand(shape, generator=generator, dtype=torch.float64) if isinstance(routing, EM) else None
                )
                found = []
                for layer in (ours.double(), plain.double()):
                    own = children.clone().requires_grad_()
                    pose_out = layer(Capsules(own, active)).pose
                    (pose_out * torch.arange(pose_out.numel()).view(pose_out.shape).sin()).sum().backward()
                    found.append([pose_out, own.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
                for one, other in zip(*found, strict=True):
                    assert relative_rms(one, other) < CLOSE, (routing, pose, dim)
