"""`torchcaps data` as a person and as a script would use it, and the pictures that it draws."""

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

from tests import commands
from tests.data import writers
from tests.data.test_folder import picture
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
    register,
)
from torchcaps.data.registry import DATASETS

pytestmark = pytest.mark.filterwarnings("ignore:.*it should have")  # the files of these tests are small


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return commands.run(capsys, "data", *words)


def refusal(*words: str) -> str:
    return commands.refusal("data", *words)


def test_list_has_every_data_set_and_says_what_is_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = {line.split()[0]: line for line in run(capsys, "list").splitlines() if line.strip()}
    assert set(list_datasets()) <= set(lines)
    assert "embedded" in lines["digits"]
    assert "no, 12 MB to get" in lines["mnist"]
    assert "yours" in lines["folder"]
    writers.put(tmp_path / "mnist/t10k-images-idx3-ubyte", b"x")
    writers.put(tmp_path / "mnist/t10k-labels-idx1-ubyte", b"x")
    rows = {row["name"]: row for row in json.loads(run(capsys, "list", "--json", "--data-dir", str(tmp_path)))}
    assert rows["mnist"]["here"] == rows["multimnist"]["here"] == "test only, 10 MB to get"
    assert rows["cifar100"]["classes"] == 100
    assert rows["smallnorb"]["image"] == "2x48x48"


def test_the_python_form_of_cifar_counts_as_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = {b"data": writers.random_bytes(2, 3072), b"labels": [1, 2]}
    writers.put(tmp_path / "cifar-10-batches-py/test_batch", writers.Python2Pickle().dictionary(content))
    rows = {row["name"]: row for row in json.loads(run(capsys, "list", "--json", "--data-dir", str(tmp_path)))}
    assert rows["cifar10"]["here"] == "test only, 170 MB to get"
    said = refusal("check", "cifar10", "--split", "test", "--data-dir", str(tmp_path))
    assert "has another checksum than the published one" in said
    assert "WRONG" in capsys.readouterr().out


def test_check_counts_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "check", "digits")
    assert "4,000 images, mean 0.13" in text
    assert "0 100; 1 100" in text
    found = json.loads(run(capsys, "check", "diverse-multimnist", "--source", "digits", "--split", "test", "--json"))
    assert found["test"]["images"]["length"] == 1000
    assert 1_750 < sum(found["test"]["images"]["histogram"]) < 1_920  # 1 in 6 has one digit


def test_check_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train-images-idx3-ubyte.gz is missing" in refusal("check", "mnist")
    assert capsys.readouterr().out.count("MISSING") == 4


def test_get_where_there_is_nothing_to_get(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to get" in run(capsys, "get", "digits")
    assert "there is nothing to get" in refusal("get", "folder")
    assert "--split must be 'train' or 'test', got 'val'" in refusal("get", "mnist", "--split", "val")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lst"], "did you mean 'list'"),
        (["get", "mnst"], "did you mean 'mnist'"),
        (["sample", "digits", "--splt", "test"], "--splt"),
        (["sample", "digits", "--split", "val"], "digits has no split 'val'"),
        (["sample", "digits", "--augmentation", "sabour2017.mnst"], "did you mean 'sabour2017.mnist'"),
        (["sample", "digits", "--augmentation", "sabour2017.smallnorb"], "does not fit into images of 28x28"),
        (["sample", "digits", "--page", "-1"], "--page must be 0 or more"),
        (["sample", "digits", "--out", "grid.jpg"], "grid.jpg must end in one of .png, .svg, .pdf"),
        (["sample", "multimnist", "--shift", "many"], "--shift"),
        (["sample", "folder"], "which one"),
        (["sample", "./nowhere"], "./nowhere is no folder, and no data set has that name"),
        (["sample", ".", "--data-dir", "."], "give the folder of images once"),
        (["sample"], "name"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], said: str) -> None:
    assert said in refusal(*words)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torchcaps data sample multimnist --source digits" in run(capsys)
    for words in (["list"], ["get"], ["check"], ["sample"], ["sample", "multimnist"]):
        with pytest.raises(SystemExit) as stop:
            main(["data", *words, "--help"])
        assert stop.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"torchcaps data {words[0]}" in text
        assert "Example: torchcaps data" in text
    assert "images of each base" in text  # the options of the data set, in its own words


# Pictures ---------------------------------------------------------------------------------------------------


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_a_page_has_a_row_for_each_class(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new/grid.png"
    assert "digits, train: 4,000 images of 1x28x28, 10 classes" in run(capsys, "sample", "digits", "--out", str(out))
    drawn = pixels(out)
    black = (drawn.max(2) == 0).mean()
    assert 0.4 < black < 0.8
    assert drawn.shape[0] > 600
    run(capsys, "sample", "digits", "--out", str(tmp_path / "other.png"), "--page", "1")
    assert not np.array_equal(pixels(tmp_path / "other.png"), drawn)
    assert [path.name for path in out.parent.iterdir()] == ["grid.png"]
    for kind in ("svg", "pdf"):
        run(capsys, "sample", "digits", "--out", str(tmp_path / f"grid.{kind}"), "--split", "test")
        assert (tmp_path / f"grid.{kind}").stat().st_size > 10_000


def test_overlapping_digits_are_drawn_in_two_colours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("multimnist", "diverse-multimnist"):
        run(capsys, "sample", name, "--source", "digits", "--out", str(tmp_path / "grid.png"))
        drawn = pixels(tmp_path / "grid.png")
        orange = (drawn[..., 0] > 200) & (drawn[..., 2] < 80)
        blue = (drawn[..., 2] > 200) & (drawn[..., 0] < 80)
        assert orange.sum() > 3000
        assert blue.sum() > 3000


def test_augmentation_is_drawn_beside_the_image(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    for name in ("sabour2017.mnist", "chen2019.cifar10", "choi2019.mnist+official"):
        for split in ("train", "test"):
            run(capsys, "sample", "digits", "--augmentation", name, "--split", split, "--out", str(out))
            assert pixels(out).std() > 50
    run(capsys, "sample", "multimnist", "--source", "digits", "--augmentation", "sabour2017.mnist", "--out", str(out))


def test_stereo_pairs_and_photographs_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_norb(tmp_path / "smallnorb", "test", zipped=True)
    out = tmp_path / "grid.png"
    run(capsys, "sample", "smallnorb", "--split", "test", "--data-dir", str(tmp_path), "--out", str(out))
    wide = pixels(out).shape[1]
    words = ("sample", "smallnorb-left", "--split", "test", "--data-dir", str(tmp_path), "--out", str(out))
    run(capsys, *words)
    assert wide > 1.6 * pixels(out).shape[1]  # both images of a pair side by side
    for name in "ab":
        for n in range(3):
            picture(tmp_path / "mine" / name / f"{n}.jpg", (50 + n, 60), seed=n)
    text = run(capsys, "sample", str(tmp_path / "mine"), "--out", str(out), "--size", "32")
    assert "mine, train: 2 images of 3x32x32, 2 classes" in text


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "can't be written: File exists" in refusal("sample", "digits", "--out", str(tmp_path / "file/grid.png"))


def test_skipped_images_are_said_on_standard_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in "ab":
        for n in range(4):
            picture(tmp_path / "mine" / name / f"{n}.png", seed=n)
    (tmp_path / "mine/a/bad.png").write_bytes(b"no")
    main(["data", "check", str(tmp_path / "mine"), "--broken", "skip"])
    assert re.search(r"^torchcaps: folder: 1 of \d images can't be read .*bad\.png$", capsys.readouterr().err, re.M)
    assert "broken='skip'" in refusal("check", str(tmp_path / "mine"))


def test_check_looks_at_the_splits_that_a_folder_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in "ab":
            picture(tmp_path / "mine" / split / name / "1.png")
    assert sorted(json.loads(run(capsys, "check", str(tmp_path / "mine"), "--json"))) == ["test", "train"]
    for name in "ab":
        picture(tmp_path / "single" / name / "1.png")
    assert list(json.loads(run(capsys, "check", str(tmp_path / "single"), "--json"))) == ["train"]


def test_a_folder_that_has_the_name_of_a_flags_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        picture(tmp_path / "train" / name / "1.png")
    monkeypatch.chdir(tmp_path)
    assert "train, train: 2 images" in run(capsys, "sample", "--split", "train", "train")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(json.loads(run(capsys, "check", "~/train", "--json"))) == ["train"]


def test_drawing_leaves_the_users_own_folders_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in (".torchcaps-notes", ".torchcaps-scratch-mine"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    run(capsys, "sample", "digits", "--out", str(tmp_path / "grid.png"))
    assert len(list(tmp_path.glob(".torchcaps-*"))) == 2


def test_a_page_far_away_and_a_title_longer_than_its_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "grid.png"
    run(capsys, "sample", "multimnist", "--source", "digits", "--page", "9" * 25, "--out", str(out))
    words = ("sample", "digits", "--split", "test", "--augmentation", "choi2019.mnist+official", "--out", str(out))
    run(capsys, *words)
    top = pixels(out)[:40].min(2)
    assert (top[:, -3:] == 255).all()  # the letters of the title end before the edge does
    assert (top < 128).any()


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Plain text on a pipe, errors on standard error with a non-zero exit."""
    command = [sys.executable, "-m", "torchcaps", "data"]
    fine = subprocess.run([*command, "list"], capture_output=True, text=True)
    assert fine.returncode == 0
    assert "multimnist" in fine.stdout
    assert "\x1b" not in fine.stdout
    wrong = subprocess.run([*command, "get", "nothing"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("torchcaps: data set must be the name of one, got 'nothing'")


def test_a_data_set_of_ones_own() -> None:
    """A frozen dataclass and a name are enough."""

    class Noise(DataSpec):
        title = "noise"

        def load(self, request: LoadRequest) -> Dataset:
            images = torch.randint(0, 256, (20, 1, 6, 6), dtype=torch.uint8)
            return ImageSet(request.name, request.split, images, torch.arange(20) % 2, ["even", "odd"])

    register("noise", Noise())
    try:
        assert len(create_dataset("noise")) == 20
        with pytest.raises(ValueError, match="exists already"):
            register("noise", Noise())
    finally:
        del DATASETS["noise"]
    with pytest.raises(TypeError, match="spec must be a data set's choice"):
        register("noise", "noise")  # type: ignore[arg-type]
    with pytest.raises(MissingDataError, match="'torchcaps data get mnist' fetches it"):
        create_dataset("mnist", download=False)
