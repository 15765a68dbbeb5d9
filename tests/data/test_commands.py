"""Commands of `torchcaps data` and the figures that they draw."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli import commands
from tests.data import writers
from tests.data.helpers import write_image
from tests.data.test_formats import write_norb
from torchcaps.cli import main
from torchcaps.data import (
    Dataset,
    DataSpec,
    ImageSet,
    LoadRequest,
    MissingDataError,
    create_dataset,
    list_datasets,
    register_dataset,
)
from torchcaps.data.registry import DATASETS

pytestmark = pytest.mark.filterwarnings("ignore:.*images, expected")  # the files of these tests are small


@pytest.fixture(autouse=True)
def empty_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return commands.run_command(capsys, "data", *words)


def usage_error(*words: str) -> str:
    return commands.usage_error("data", *words)


def test_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, "list")
    assert "\x1b" not in text  # plain text, since standard output is not a terminal
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert set(list_datasets()) <= set(lines)
    assert "embedded" in lines["digits"]
    assert "12 MB" in lines["mnist"]
    writers.put(tmp_path / "mnist/t10k-images-idx3-ubyte", b"x")
    writers.put(tmp_path / "mnist/t10k-labels-idx1-ubyte", b"x")
    rows = {row["name"]: row for row in json.loads(run(capsys, "list", "--json", "--data-dir", str(tmp_path)))}
    assert rows["mnist"]["available"] == rows["multimnist"]["available"] == "test only (10 MB to download)"
    assert rows["cifar100"]["classes"] == 100
    assert rows["smallnorb"]["image"] == "2x48x48"


def test_python_files_of_cifar_are_available(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = {b"data": writers.random_bytes(2, 3072), b"labels": [1, 2]}
    path = tmp_path / "cifar-10-batches-py/test_batch"
    writers.put(path, writers.Python2Pickle().dictionary(content))
    rows = {row["name"]: row for row in json.loads(run(capsys, "list", "--json", "--data-dir", str(tmp_path)))}
    assert rows["cifar10"]["available"] == "test only (170 MB to download)"
    assert str(path) in usage_error("check", "cifar10", "--split", "test", "--data-dir", str(tmp_path))
    assert "MISMATCH" in capsys.readouterr().out


def test_check_counts_images_and_prints_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "check", "digits")
    assert "4,000 images, mean 0.13" in text
    assert "0 100; 1 100" in text
    report = json.loads(run(capsys, "check", "diverse-multimnist", "--source", "digits", "--split", "test", "--json"))
    statistics = report["test"]["statistics"]
    assert statistics["n_images"] == 1000
    assert 1_750 < sum(statistics["class_counts"]) < 1_920  # 1 in 6 has one digit


def test_check_names_missing_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train-images-idx3-ubyte.gz" in usage_error("check", "mnist")
    assert capsys.readouterr().out.count("MISSING") == 4


def test_get_without_files_to_download(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "get", "digits").startswith("digits: ")
    assert "'folder'" in usage_error("get", "folder")
    message = usage_error("get", "mnist", "--split", "val")
    for part in ("--split", "'train' or 'test'", "'val'"):
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["lst"], ["'lst'", "'list'"]),
        (["get", "mnst"], ["'mnst'", "'mnist'"]),
        (["sample", "digits", "--splt", "test"], ["--splt"]),
        (["sample", "digits", "--split", "val"], ["--split must be 'train' or 'test'", "'val'"]),
        (["sample", "digits", "--augmentation", "sabour2017.mnst"], ["'sabour2017.mnst'", "'sabour2017.mnist'"]),
        (["sample", "digits", "--augmentation", "sabour2017.smallnorb"], ["RandomCrop(size=32", "28x28"]),
        (["sample", "digits", "--page", "-1"], ["--page", "-1"]),
        (["sample", "digits", "--out", "grid.jpg"], ["grid.jpg", ".png, .svg, .pdf"]),
        (["sample", "multimnist", "--seed", "many"], ["--seed", "many"]),
        (["sample", "folder"], ["folder", "--data-dir"]),
        (["sample", "./nowhere"], ["./nowhere"]),
        (["sample", ".", "--data-dir", "."], ["'.'", "--data-dir"]),
        (["sample"], ["name"]),
    ],
)
def test_invalid_arguments(arguments: list[str], mentions: list[str]) -> None:
    message = usage_error(*arguments)
    for part in mentions:
        assert part in message


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torchcaps data sample multimnist --source digits" in run(capsys)
    for arguments in (["list"], ["get"], ["check"], ["sample"], ["sample", "multimnist"]):
        with pytest.raises(SystemExit) as stop:
            main(["data", *arguments, "--help"])
        assert stop.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"torchcaps data {arguments[0]}" in text
        assert "examples: torchcaps data" in text
    assert "number of images per base digit" in text.lower()  # from the docstring of MultiMNIST


# Figures ----------------------------------------------------------------------------------------------------


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_sample_draws_one_row_per_class(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new/grid.png"
    assert "digits, train: 4,000 images of 1x28x28, 10 classes" in run(capsys, "sample", "digits", "--out", str(out))
    drawn = pixels(out)
    black = (drawn.max(2) == 0).mean()
    assert 0.4 < black < 0.8
    assert drawn.shape[0] > 600
    run(capsys, "sample", "digits", "--out", str(tmp_path / "other.png"), "--page", "1")
    other = pixels(tmp_path / "other.png")
    assert other.shape != drawn.shape or np.abs(other.astype(int) - drawn).max() > 0, "both pages are equal"
    assert [path.name for path in out.parent.iterdir()] == ["grid.png"]
    for kind in ("svg", "pdf"):
        run(capsys, "sample", "digits", "--out", str(tmp_path / f"grid.{kind}"), "--split", "test")
        assert (tmp_path / f"grid.{kind}").stat().st_size > 10_000


def test_sample_draws_overlapping_digits_in_two_colors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("multimnist", "diverse-multimnist"):
        run(capsys, "sample", name, "--source", "digits", "--out", str(tmp_path / "grid.png"))
        drawn = pixels(tmp_path / "grid.png")
        orange = (drawn[..., 0] > 200) & (drawn[..., 2] < 80)
        blue = (drawn[..., 2] > 200) & (drawn[..., 0] < 80)
        assert orange.sum() > 3000
        assert blue.sum() > 3000


def test_sample_draws_augmented_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    for name in ("sabour2017.mnist", "chen2019.cifar10", "choi2019.mnist+official"):
        for split in ("train", "test"):
            run(capsys, "sample", "digits", "--augmentation", name, "--split", split, "--out", str(out))
            assert pixels(out).std() > 50
    run(capsys, "sample", "multimnist", "--source", "digits", "--augmentation", "sabour2017.mnist", "--out", str(out))


def test_sample_draws_stereo_pairs_and_photographs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_norb(tmp_path / "smallnorb", "test", compressed=True)
    out = tmp_path / "grid.png"
    run(capsys, "sample", "smallnorb", "--split", "test", "--data-dir", str(tmp_path), "--out", str(out))
    width = pixels(out).shape[1]
    words = ("sample", "smallnorb-left", "--split", "test", "--data-dir", str(tmp_path), "--out", str(out))
    run(capsys, *words)
    assert width > 1.6 * pixels(out).shape[1]  # both images of a pair side by side
    for name in "ab":
        for n in range(3):
            write_image(tmp_path / "mine" / name / f"{n}.jpg", (50 + n, 60), seed=n)
    text = run(capsys, "sample", str(tmp_path / "mine"), "--out", str(out), "--size", "32")
    assert "mine, train: 2 images of 3x32x32, 2 classes" in text


def test_sample_to_an_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "File exists" in usage_error("sample", "digits", "--out", str(tmp_path / "file/grid.png"))


def test_skipped_images_are_reported_on_standard_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in "ab":
        for n in range(4):
            write_image(tmp_path / "mine" / name / f"{n}.png", seed=n)
    (tmp_path / "mine/a/bad.png").write_bytes(b"no")
    main(["data", "check", str(tmp_path / "mine")])
    assert re.search(r"^torchcaps: folder: 1 of \d images .*bad\.png$", capsys.readouterr().err, re.M)
    assert "--on-error skip" in usage_error("check", str(tmp_path / "mine"), "--on-error", "fail")


def test_check_uses_the_splits_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in "ab":
            write_image(tmp_path / "mine" / split / name / "1.png")
    assert sorted(json.loads(run(capsys, "check", str(tmp_path / "mine"), "--json"))) == ["test", "train"]
    for name in "ab":
        write_image(tmp_path / "single" / name / "1.png")
    assert list(json.loads(run(capsys, "check", str(tmp_path / "single"), "--json"))) == ["train"]


def test_folder_with_the_name_of_a_flag_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write_image(tmp_path / "train" / name / "1.png")
    monkeypatch.chdir(tmp_path)
    assert "train, train: 2 images" in run(capsys, "sample", "--split", "train", "train")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(json.loads(run(capsys, "check", "~/train", "--json"))) == ["train"]


def test_sample_keeps_other_directories(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in (".torchcaps-notes", ".torchcaps-scratch-mine"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    run(capsys, "sample", "digits", "--out", str(tmp_path / "grid.png"))
    assert len(list(tmp_path.glob(".torchcaps-*"))) == 2


def test_sample_with_large_page_number_and_long_title(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    run(capsys, "sample", "multimnist", "--source", "digits", "--page", "9" * 25, "--out", str(out))
    words = ("sample", "digits", "--split", "test", "--augmentation", "choi2019.mnist+official", "--out", str(out))
    run(capsys, *words)
    top = pixels(out)[:40].min(2)
    assert top[:, -3:].min() == 255  # the title ends before the edge
    assert top.min() < 128


def test_subprocess_exits_with_2_and_prints_one_line_on_error() -> None:
    command = [sys.executable, "-m", "torchcaps", "data", "get", "nothing"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("torchcaps: ")
    assert "'nothing'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_register_and_create_a_data_set() -> None:
    """A DataSpec and a name are sufficient."""

    class Noise(DataSpec):
        title = "noise"

        def load(self, request: LoadRequest) -> Dataset:
            images = torch.randint(0, 256, (20, 1, 6, 6), dtype=torch.uint8)
            return ImageSet(request.name, request.split, images, torch.arange(20) % 2, ["even", "odd"])

    with DATASETS.restored():
        register_dataset("noise", Noise())
        assert len(create_dataset("noise")) == 20
        with pytest.raises(ValueError, match="'noise'"):
            register_dataset("noise", Noise())
    assert "noise" not in list_datasets()
    with pytest.raises(TypeError, match=r"spec.* str$"):
        register_dataset("noise", "noise")  # type: ignore[arg-type]
    with pytest.raises(MissingDataError, match="torchcaps data get mnist"):
        create_dataset("mnist", download=False)
