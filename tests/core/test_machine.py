import datetime
import sys

import pytest
import torch

from torchcaps._core.machine import describe_machine, record_header


def test_machine_has_processor_threads_and_versions() -> None:
    machine = describe_machine(processes=2, device="cuda")
    assert machine["processes"] == 2
    assert machine["device"] == "cuda"
    assert machine["threads"] == torch.get_num_threads()
    assert machine["torch"] == torch.__version__
    assert isinstance(machine["cpu"], str)
    assert machine["vectors"] == torch.backends.cpu.get_cpu_capability()


def test_header_has_command_and_utc_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/torchcaps", "train", "--note", "two words"])
    header = record_header()
    assert header["command"] == "torchcaps train --note 'two words'"
    assert datetime.datetime.fromisoformat(header["finished"]).utcoffset() == datetime.timedelta(0)
