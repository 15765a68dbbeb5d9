"""Compiled CPU kernel: fallback without a compiler, and narrower vector registers."""

import hashlib
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.sampling import all_cases, sample
from tests.tolerances import SAME, STREAMED, relative_rms
from torchcaps import Capsules
from torchcaps._core.files import STAGING_PREFIX
from torchcaps._core.machine import processor_features
from torchcaps.nn import CapsuleLayer, ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Dynamic, InvertedAttention, Routing
from torchcaps.votes.cpu import build
from torchcaps.votes.dispatch import override_thresholds

CLOSE = SAME[torch.float64]
INSTRUCTION_SETS = {"sse2": ("-march=x86-64",), "avx2": ("-march=x86-64", "-mavx2", "-mfma")}


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_fallback_without_a_working_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A disabled kernel, no compiler, one that fails or can't be run, a cache that can't be written: never an error."""
    failing = write_script(tmp_path / "failing", "#!/bin/sh\necho 'kernel.cpp:1: error: no' >&2\nexit 1\n")
    invalid = write_script(tmp_path / "invalid", "not a program")
    quick = write_script(tmp_path / "quick", '#!/bin/sh\nexec c++ "$@" -O0\n')  # the last -O flag wins
    (tmp_path / "file").write_text("")
    without_compiler = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "three")}
    cases = [  # changed environment, whether there is a kernel, the program that the warning names
        ({build.DISABLE_VARIABLE: "0"}, False, ""),
        ({"CXX": str(failing), "XDG_CACHE_HOME": str(tmp_path / "one")}, False, str(failing)),
        ({"CXX": str(failing), "XDG_CACHE_HOME": str(tmp_path / "one")}, False, ""),  # the failure is cached
        ({"CXX": str(invalid), "XDG_CACHE_HOME": str(tmp_path / "two")}, False, str(invalid)),
        (without_compiler, False, "C++ compiler"),
        (without_compiler, False, ""),  # printed once per process
    ]
    if all_cases():  # falls back to the temporary directory
        cases.append(({"CXX": str(quick), "XDG_CACHE_HOME": str(tmp_path / "file")}, True, "compiling"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    build._print_missing_compiler.cache_clear()
    for changes, has_kernel, warning in cases:
        with monkeypatch.context() as patch:
            patch.delenv(build.DISABLE_VARIABLE, raising=False)
            for name, value in changes.items():
                patch.setenv(name, value)
            build.load_library.cache_clear()
            layer = DenseCapsules(16, 8, 10, 16, routing="dynamic", streamed=True)
            assert layer(torch.randn(2, 16, 8)).pose.shape == (2, 10, 16)
            assert (build.load_library(torch.float32) is not None) == has_kernel, changes
        build.load_library.cache_clear()
        printed = capfd.readouterr().err
        assert (warning in printed) if warning else printed == "", printed
    assert list(tmp_path.glob(f"**/{STAGING_PREFIX}*")) == []


TINY_KERNEL = 'extern "C" int torchcaps_forward() { return 42; }'
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "overwritten": lambda data: b"\0" * 9 + data[9:],
    "empty": lambda data: b"",
}


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_library_is_compiled_again(
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Loading a damaged library would end this process or compute something else."""
    source = tmp_path / "kernel.cpp"
    source.write_text(TINY_KERNEL)
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.DISABLE_VARIABLE, raising=False)
    load = build.load_library.__wrapped__  # not cached
    assert load(torch.float32).torchcaps_forward() == 42
    (path,) = (tmp_path / "torchcaps").glob("*.so")
    intact = path.read_bytes()
    assert path.stem.endswith(hashlib.sha256(intact).hexdigest())
    capfd.readouterr()
    assert load(torch.float32).torchcaps_forward() == 42
    assert capfd.readouterr().err == ""  # loaded from the cache
    replacement = tmp_path / "damaged"  # another file: the first one is mapped into this process
    replacement.write_bytes(damage(intact))
    replacement.replace(path)
    assert load(torch.float32).torchcaps_forward() == 42
    assert str(path) in capfd.readouterr().err
    (rebuilt,) = (tmp_path / "torchcaps").glob("*.so")
    assert rebuilt.stem.endswith(hashlib.sha256(rebuilt.read_bytes()).hexdigest())


def has_feature(feature: str) -> bool:
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    return platform.machine() == "x86_64" and compiler and feature in processor_features().split()


@pytest.fixture
def narrow_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Compile a kernel for narrower registers than this processor's, without optimisation and not cached."""
    other_flags = tuple(flag for flag in build.FLAGS if flag not in ("-O3", "-march=native"))
    monkeypatch.setattr(build, "FLAGS", ("-O1", *INSTRUCTION_SETS[request.param], *other_flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.DISABLE_VARIABLE, raising=False)
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def make_layers(routing: Routing, pose: str, dim: int, streamed: bool) -> list[CapsuleLayer]:
    return [
        DenseCapsules(7, dim, 5, dim, routing=routing, pose=pose, streamed=streamed),  # type: ignore[arg-type]
        ConvCapsules(3, dim, 5, dim, 3, 2, 1, routing=routing, pose=pose, streamed=streamed),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    "narrow_kernel",
    [
        pytest.param(name, marks=pytest.mark.skipif(not has_feature(name), reason=f"the processor has no {name}"))
        for name in sample(INSTRUCTION_SETS, 1)
    ],
    indirect=True,
)
@pytest.mark.skipif(not all_cases(), reason="compiles a kernel: runs with --all-cases")
@pytest.mark.usefixtures("narrow_kernel")
def test_narrow_registers_give_the_same_values_and_gradients() -> None:
    """Register tiles that are full, and remainders: 16 and 9 components as matrices, 8 and 5 as vectors."""
    assert build.load_library(torch.float64) is not None
    generator = torch.Generator().manual_seed(0)
    for routing in (Dynamic(3), Dynamic(2, leak=True), InvertedAttention(2), EM(2)):
        for pose, dim in (("matrix", 16), ("vector", 8), ("matrix", 9), ("vector", 5)):
            torch.manual_seed(0)
            pairs = zip(make_layers(routing, pose, dim, True), make_layers(routing, pose, dim, False), strict=True)
            for (streamed, stored), shape in zip(pairs, ((37, 7), (3, 6, 5, 3)), strict=True):
                stored.load_state_dict(streamed.state_dict())
                children = torch.randn(*shape, dim, generator=generator, dtype=torch.float64)
                activation = (
                    torch.rand(shape, generator=generator, dtype=torch.float64) if isinstance(routing, EM) else None
                )
                results = []
                for layer in (streamed.double(), stored.double()):
                    leaf = children.clone().requires_grad_()
                    parents = layer(Capsules(leaf, activation)).pose
                    (parents * torch.arange(parents.numel()).view(parents.shape).sin()).sum().backward()
                    results.append([parents, leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
                for actual, expected in zip(*results, strict=True):
                    assert relative_rms(actual, expected) < CLOSE, (routing, pose, dim)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_lanes", [16, 256])
def test_children_of_any_dimension_and_any_number_of_lanes(dtype: torch.dtype, max_lanes: int) -> None:
    """Blocks of 16, 8, 4 and single values are read by different code; the last chunk has fewer lanes."""
    vectors = [(dim, "vector") for dim in (1, 3, 4, 7, 8, 12, 16, 19, 35)]
    for dim, pose in [*vectors, (4, "matrix"), (16, "matrix"), (36, "matrix")]:
        for routing in (InvertedAttention(2), EM(2)):
            parent_dim = dim if pose == "matrix" else 5
            layer = ConvCapsules(5, dim, 3, parent_dim, 3, 2, padding=1, routing=routing, pose=pose, dtype=dtype)  # type: ignore[arg-type]
            children = Capsules(torch.randn(5, 5, 4, 5, dim, dtype=dtype), torch.rand(5, 5, 4, 5, dtype=dtype))
            results, direction = {}, torch.randn(parent_dim, dtype=dtype)
            for streamed in (False, True):
                layer.streamed = streamed
                inputs = [children.pose.clone().requires_grad_(), *layer.parameters()]
                with override_thresholds(MAX_CHUNK_LANES=max_lanes):
                    parents = layer(Capsules(inputs[0], children.activation)).pose
                    gradients = torch.autograd.grad((parents @ direction).sum(), inputs, allow_unused=True)
                results[streamed] = [parents, *(g for g in gradients if g is not None)]
            for found, expected in zip(results[True], results[False], strict=True):
                assert relative_rms(found, expected) < STREAMED[dtype], (dim, routing)
