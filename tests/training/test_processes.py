"""Several processes: the weights and the numbers of one, and an end together."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.tolerances import SAME, relative_rms
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.logging import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "torchcaps"]
PLAIN = [sys.executable, "-m", "torchcaps"]
# Quadratic routing takes a step of its own with all labels; the last of the 71 images leaves a process without any.
WORDS = [
    *("train", "tests.training.own.Narrow", "--data", "tests.training.own.FewDigits", "--data.train=71"),
    *("--batch-size", "14", "--steps", "50", "--routing", "quadratic", "--val-fraction", "0", "--num-threads", "1"),
    *("--max-test-images", "29", "--eval-interval-epochs", "4"),
]


def start(command: list[str], *words: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_two_processes_reach_the_weights_and_the_numbers_of_one(tmp_path: Path) -> None:
    """By --devices and by torchrun: the same global batches, each image once, one writer."""
    runs = {
        "one": start(PLAIN, *WORDS, "--out", str(tmp_path / "one")),
        "two": start(PLAIN, *WORDS, "--devices", "2", "--out", str(tmp_path / "two")),
        "torchrun": start(TORCHRUN, *WORDS, "--out", str(tmp_path / "torchrun")),
    }
    said = {}
    for name, process in runs.items():
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        said[name] = out
    one = read_checkpoint(tmp_path / "one/checkpoints/last.safetensors")
    rows = read_metrics(tmp_path / "one/metrics.csv")
    for name in ("two", "torchrun"):
        assert said[name].count("in " + str(tmp_path)) == 1  # one speaks
        other = read_checkpoint(tmp_path / name / "checkpoints/last.safetensors")
        assert other.state["run"]["step"] == 50
        whole, found = (
            torch.cat(
                [tensor.flatten() for key, tensor in sorted(c.part("model").items()) if tensor.is_floating_point()]
            )
            for c in (one, other)
        )
        assert relative_rms(found, whole) < SAME[torch.float32]
        coefficients = [key for key in one.part("model") if key.endswith("coefficient")]
        assert len(coefficients) == 1
        for key in coefficients:
            assert relative_rms(other.part("model")[key], one.part("model")[key]) < SAME[torch.float32]
        for row, mine in zip(rows, read_metrics(tmp_path / name / "metrics.csv"), strict=True):
            assert mine["step"] == row["step"]
            assert mine["train_accuracy"] == row["train_accuracy"]
            assert mine["test_accuracy"] == row["test_accuracy"]
            assert abs((mine["train_loss"] or 0) - (row["train_loss"] or 0)) < 1e-5


def test_when_a_process_dies_the_others_end_soon_and_say_so(tmp_path: Path) -> None:
    words = [*WORDS, "--steps", "100000", "--checkpoint-interval-steps", "20"]
    runs = {
        name: start(c, *words, "--out", str(tmp_path / name), *more)
        for name, c, more in (("devices", PLAIN, ["--devices", "2"]), ("torchrun", TORCHRUN, []))
    }
    for name, run in runs.items():
        checkpoint = tmp_path / name / "checkpoints/last.safetensors"
        _await(checkpoint, run)
        (second,) = [pid for pid in _below(run.pid) if _rank(pid) == "1"]
        os.kill(second, signal.SIGKILL)
        died = time.monotonic()
        _, err = run.communicate(timeout=60)
        assert time.monotonic() - died < 30
        assert run.returncode != 0
        assert re.search("torchcaps: another process of this run has ended|was ended by SIGKILL", err), err
        assert not _below(run.pid)
        assert read_checkpoint(checkpoint).state["run"]["step"] > 0


def test_a_wish_to_stop_reaches_all_processes(tmp_path: Path) -> None:
    words = [
        *WORDS,
        "--steps",
        "100000",
        "--checkpoint-interval-steps",
        "10",
        "--devices",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    words += [
        "--max-test-images",
        "1",
        "--eval-interval-epochs",
        "1",
    ]  # a look that one of the processes has no image for
    run = start(PLAIN, *words)
    checkpoint = tmp_path / "run/checkpoints/last.safetensors"
    _await(checkpoint, run)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert err.count("stopped at step") == 1
    assert "torchcaps train --resume" in err
    stopped = int(re.findall(r"stopped at step ([\d,]+)", err)[0].replace(",", ""))
    assert read_checkpoint(checkpoint).state["run"]["step"] == stopped


def _await(checkpoint: Path, run: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            children.append(int(entry.parent.name))
    return children + [grandchild for child in children for grandchild in _below(child)]


def _rank(pid: int) -> str:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return entry[5:].decode()
    return ""
