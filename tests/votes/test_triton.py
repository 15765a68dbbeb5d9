"""Triton kernels without a GPU: interpreted against the definitions, compiled for three GPUs, and the choice of them.

Whether Triton interprets is decided when it is imported, so interpreted cases run in a process of their own, with the
environment variable TRITON_INTERPRET=1: `tests/votes/interpreted.py`, and the contract suite with its path "triton".
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sampling import all_cases, sample
from torchcaps.nn import DenseCapsules
from torchcaps.votes import Wiring, dispatch
from torchcaps.votes.cpu.build import DISABLE_VARIABLE
from torchcaps.votes.dispatch import ChunkPlan, VotePath, choose_path
from torchcaps.votes.reductions import BY_NAME, Mix, Reduction
from torchcaps.votes.triton import launch, support
from torchcaps.votes.triton.launch import LAUNCH_OPTIONS, Launch

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = [kind for kind in BY_NAME.values() if kind is not Mix]

# Interpreter --------------------------------------------------------------------------------------------------------


def run_interpreted(*arguments: str) -> None:
    """Run pytest with interpreted kernels; fail with its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


@needs_triton
@pytest.mark.timeout(1200)
def test_interpreted_kernels_equal_the_definitions() -> None:
    run_interpreted("tests/votes/interpreted.py")


N_SHARDS = 16 if all_cases() else 1


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(N_SHARDS))
def test_contract_suite_with_interpreted_kernels(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed equals stored: a few cases, or all of them in several processes."""
    monkeypatch.setenv("TORCHCAPS_TEST_SHARD", f"{shard}/{N_SHARDS}")
    run_interpreted("tests/contract/test_streaming.py", "-k", "test_streamed_equals_stored")


# Compiler -----------------------------------------------------------------------------------------------------------

CAPABILITIES = (75, 80, 90)  # T4, A100, H100
MAX_REGISTERS = 255  # of a thread; a kernel that needs more spills them
MAX_STACK_BYTES = 64  # of a thread
MAX_SHARED_BYTES = 64 * 2**10  # of a program on sm_75, the smallest

# Wiring, rows, columns, parents, columns of a vote, images: layers of the papers.
LAYERS = {
    "sabour2017": (Wiring(1152), 1, 8, 10, 16, 128),
    "tsai2020_cifar100": (Wiring(32, (16, 16), (3, 3), (2, 2)), 6, 6, 32, 6, 128),
    "hinton2018": (Wiring(32, (14, 14), (3, 3), (2, 2)), 4, 4, 32, 4, 64),
    "choi2019": (Wiring(16, (8, 8), (3, 3), (1, 1), (1, 1, 1, 1), slot_kind="type"), 1, 16, 16, 16, 64),
    "many_classes": (Wiring(512), 4, 4, 1000, 4, 32),
    "one_image": (Wiring(6), 1, 1, 2, 1, 1),
}
MANY = {
    "many_children": (Wiring(2**16 + 1), 1, 8, 10, 16, 2),
    "many_parents": (Wiring(8), 1, 8, support.MAX_PARENTS, 256, 2),
}


def record_launches(
    kind: type[Reduction], layer: str, dtype: torch.dtype, patch: pytest.MonkeyPatch, bias: bool = True
) -> list[Launch]:
    """Return the launches of forward and backward; tensors are on the meta device."""
    wiring, rows, columns, parents, outs, batch = (LAYERS | MANY)[layer]
    launches: list[Launch] = []
    patch.setattr(launch, "run", launches.append)

    def new(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    pose = new(batch, *(wiring.grid or ()), wiring.types, rows * columns)
    weight = new(wiring.n_slots, columns * wiring.children_per_slot, parents, outs)
    pairs, by_parent = (
        new(batch, *wiring.sites, wiring.n_slots, parents),
        new(batch, *wiring.sites, parents, rows * outs),
    )
    arguments = [pairs if slotted else by_parent for slotted in kind.slotted]
    inputs = (pose, weight, new(wiring.n_slots, parents, rows * outs) if bias else None, *arguments)
    plan = ChunkPlan(wiring, rows)
    result = launch.forward_pass(kind, plan, *inputs)
    assert result.shape == (by_parent if kind.per_parent else pairs).shape
    gradients = launch.backward_pass(kind, plan, (True,) * len(inputs), result, *inputs)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        assert gradient is None or (gradient.shape, gradient.dtype) == (tensor.shape, dtype)
    return launches


def compile_launch(call: Launch, capability: int) -> tuple[int, int, int]:
    """Compile a kernel as the launch would; return registers and stack bytes per thread, shared bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchcaps.votes.triton import kernels

    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    signature = {name: types[v.dtype] if isinstance(v, torch.Tensor) else "i32" for name, v in call.arguments.items()}
    signature |= dict.fromkeys(call.constants, "constexpr")
    source = ASTSource(fn=getattr(kernels, call.kernel), signature=signature, constexprs=call.constants)
    options = {"num_warps": call.n_warps, **LAUNCH_OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", report)}
    return used["REG"], used["STACK"], compiled.metadata.shared


COMPILED = [
    (kind, layer, dtype, capability)
    for kind in KINDS
    for layer in LAYERS
    for dtype in support.DTYPES
    for capability in CAPABILITIES
]


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "layer", "dtype", "capability"),
    sample(COMPILED, 2, seed=3),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_kernels_compile_within_the_limits_of_each_gpu(
    kind: type[Reduction],
    layer: str,
    dtype: torch.dtype,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(kind, layer, dtype, monkeypatch)
    unique = {(call.kernel, *sorted(call.constants.items(), key=str)): call for call in launches}
    for call in unique.values():
        registers, stack, shared = compile_launch(call, capability)
        name = f"{call.kernel} {call.constants}"
        assert 0 < registers <= MAX_REGISTERS, name
        assert stack <= MAX_STACK_BYTES, name
        assert shared <= MAX_SHARED_BYTES, name


@pytest.mark.parametrize("layer", LAYERS | MANY)
def test_launches_cover_all_lanes_slots_and_parents(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids within CUDA's limits, offsets inside of a block within int32."""
    for kind in KINDS:
        for call in record_launches(kind, layer, torch.float32, monkeypatch, bias=False):
            sizes, constants = call.arguments, call.constants
            assert call.grid[0] < 2**31
            assert max(call.grid[1:]) < 2**16
            rows = sizes.get("n_lanes") or sizes["n_positions"]
            in_block = (constants["BS"] // (constants["H"] * constants["W"]) + 1) * constants["L0"] * constants["L1"]
            assert max(in_block, constants["BS"]) * sizes["n_slots"] * constants["J"] < 2**31
            if call.kernel == "weight_gradient":
                assert call.grid[0] == sizes["n_slots"] * constants["PARTS"]
                assert call.grid[2] * sizes["blocks_per_split"] * constants["BS"] >= rows
            elif call.kernel == "pose_gradient":
                assert call.grid[0] // constants["TYPES"] * constants["BS"] >= rows
            else:
                assert call.grid[0] * constants["BS"] >= rows
            if call.kernel.startswith("attend"):
                assert constants["BJ"] >= constants["J"]
            elif call.kernel != "pose_gradient":
                assert call.grid[1] * constants["BJ"] >= constants["J"]
            if "slots_per_split" in sizes:
                assert call.grid[2] * sizes["slots_per_split"] >= sizes["n_slots"]
                assert (call.grid[2] - 1) * sizes["slots_per_split"] < sizes["n_slots"]  # none is empty


# Choice -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Let the CPU count as a GPU; record launches instead of running them."""
    launches: list[Launch] = []
    monkeypatch.setattr(support, "DEVICES", ("cpu",))
    monkeypatch.setattr(launch, "run", launches.append)
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    support._is_usable.cache_clear()
    yield launches
    support._is_usable.cache_clear()


@needs_triton
def test_kernels_are_chosen_on_a_gpu(on_cpu: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing="dynamic", streamed=True)
    assert choose_path(True, layer.weight, 0, 1) is VotePath.STREAMED_TRITON
    assert choose_path("auto", layer.weight, dispatch.MAX_STORED_BYTES + 1, 1) is VotePath.STREAMED_TRITON
    assert choose_path("auto", layer.weight, dispatch.MIN_KERNEL_BYTES, 64) is VotePath.STORED
    pose = torch.randn(2, 6, 4, requires_grad=True)
    layer(pose).pose.sum().backward()
    assert {call.kernel for call in on_cpu} >= {"attend", "attend_backward", "pose_gradient", "weight_gradient"}
    on_cpu.clear()
    layer.double()(pose.double())  # no kernels for float64
    assert choose_path(True, layer.weight, 0, 1) is not VotePath.STREAMED_TRITON
    layer.float()
    monkeypatch.setenv(DISABLE_VARIABLE, "0")
    layer(pose)
    assert choose_path(True, layer.weight, 0, 1) is not VotePath.STREAMED_TRITON
    assert on_cpu == []


def test_torch_computes_without_triton(on_cpu: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    layer = DenseCapsules(6, 4, 3, 4, routing="dynamic", streamed=True)
    assert choose_path(True, layer.weight, 0, 1) is not VotePath.STREAMED_TRITON
    assert torch.isfinite(layer(torch.randn(2, 6, 4)).pose).all()
    assert on_cpu == []


@pytest.fixture
def emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Let Triton find a GPU of compute capability 8.0 with an empty cache: it has to compile its launcher."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [str(tmp_path)])
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(support, "_is_usable", functools.cache(support._is_usable.__wrapped__))
    monkeypatch.setattr(support, "_driver_starts", functools.cache(support._driver_starts.__wrapped__))
    return torch.device("cuda")


@needs_triton
@pytest.mark.parametrize("compiler", [None, "/no/such/compiler", "/bin/false"])
def test_torch_computes_without_a_c_compiler(
    compiler: str | None,
    emulated_gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Triton compiles its launcher on first use; the reason of a failure is printed once."""
    monkeypatch.setenv("PATH", "")
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    for _ in range(2):
        assert not support.has_triton(emulated_gpu)
    assert capsys.readouterr().err.count("falling back") == 1


@needs_triton
def test_kernels_are_usable_if_the_launcher_compiles(
    emulated_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triton.backends.nvidia import driver as nvidia

    monkeypatch.setattr(nvidia, "CudaUtils", object)
    monkeypatch.setenv("CC", "cc")
    assert support.has_triton(emulated_gpu)
    assert capsys.readouterr().err == ""


def test_the_package_imports_triton_only_to_run_a_kernel() -> None:
    code = "import sys, torchcaps.nn; sys.exit('triton.language' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
