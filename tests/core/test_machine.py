import datetime
import sys
from pathlib import Path

import pytest
import torch

from torchcaps._core import machine
from torchcaps._core.machine import describe_machine, memory_limit, record_header


def test_machine_has_processor_threads_and_versions() -> None:
    description = describe_machine(processes=2, device="cuda")
    assert description["processes"] == 2
    assert description["device"] == "cuda"
    assert description["threads"] == torch.get_num_threads()
    assert description["torch"] == torch.__version__
    assert isinstance(description["cpu"], str)
    assert description["vectors"] == torch.backends.cpu.get_cpu_capability()


def test_header_has_command_and_utc_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/torchcaps", "train", "--note", "two words"])
    header = record_header()
    assert header["command"] == "torchcaps train --note 'two words'"
    assert datetime.datetime.fromisoformat(header["finished"]).utcoffset() == datetime.timedelta(0)


GIB = 2**30


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": f"{GIB}"}, GIB),
        ("0::/job/step\n", {"job/step/memory.max": f"{GIB}", "job/memory.max": f"{2 * GIB}"}, GIB),
        ("0::/\n", {"memory.max": f"{GIB}"}, GIB),  # in a container with a cgroup namespace
        ("4:memory:/docker/id\n0::/\n", {"memory/docker/id/memory.limit_in_bytes": f"{GIB}"}, GIB),
        ("4:cpu,memory:/docker/id\n", {"memory/memory.limit_in_bytes": f"{GIB}"}, GIB),  # the path is that of the host
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),  # unlimited
        ("4:cpuset:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{GIB}"}, None),
        ("0::/../../job\n", {"memory.max": f"{GIB}"}, GIB),
        ("damaged\n", {}, None),
    ],
)
def test_memory_limit_is_that_of_the_cgroup(
    membership: str, files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP_MEMBERSHIP", tmp_path / "missing")
    whole = memory_limit()
    assert whole > GIB
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(machine, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "CGROUP_ROOT", root)
    assert memory_limit() == (whole if expected is None else expected)
