"""Directories of images on the command line: broken files, sizes, splits, unbalanced classes and predictions."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.commands import run_command, usage_error
from tests.training.tiny import MODEL
from torchcaps.cli import main
from torchcaps.cli.runs import _print_comparison
from torchcaps.training import StopReason, TrainResult, load_run
from torchcaps.training.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("here")

TINY = ["--steps", "2", "--batch-size", "8", "--num-threads", "1", "--out", "run", "--augmentation="]


def write_images(directory: str, counts: dict[str, int], size: tuple[int, int] = (28, 28), seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, (name, count) in enumerate(counts.items()):
        Path(directory, name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            pixels = (torch.rand(*size, generator=generator) * 100 + 70 * index).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(f"{directory}/{name}/{n}.png")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> str:
    """A run on 12 and 4 images of two classes; one file is broken afterwards."""
    write_images("pics", {"a": 12, "b": 4})
    run_command(capsys, "train", "./pics", MODEL, *TINY)
    Path("pics/a/broken.png").write_bytes(b"no image")
    return "run"


@pytest.mark.filterwarnings("always:folder")
def test_broken_images_fail_if_requested_and_the_remedy_works_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    write_images("pics", {"a": 6, "b": 6})
    for name in "ab":
        Path(f"pics/{name}/broken.png").write_bytes(b"no image")
    for form in (["./pics", MODEL], [MODEL, "--data", "pics"], [MODEL, "--data", "folder", "--data-dir", "pics"]):
        message = usage_error("train", *form, *TINY, "--on-error", "fail")
        assert "--on-error skip" in message
        assert "--on-error skip" in usage_error("train", *form, *TINY, "--data.on-error", "fail")
    main(["train", "./pics", MODEL, *TINY, "--data.on-error", "skip"])
    assert "2 of 10 images can't be read and are skipped" in capsys.readouterr().err
    message = usage_error("train", "./pics", MODEL, "--on-error", "fail", "--data.on-error", "skip")
    assert "--data.on-error" in message


def test_an_unsplit_directory_is_evaluated_completely(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_images("more", {"a": 7, "b": 5}, seed=1)
    assert "more, all: 12 images" in run_command(capsys, "evaluate", run, "--data", "more")
    assert "more, test: 2 images" in run_command(capsys, "evaluate", run, "--data", "more", "--split", "test")
    with pytest.warns(UserWarning, match=r"1 of 17 images .*broken\.png"):
        main(["evaluate", run, "--split", "all"])
    streams = capsys.readouterr()
    assert "pics, all: 16 images" in streams.out
    assert "trained on" in streams.err
    assert "--on-error skip" in usage_error("evaluate", run, "--split", "all", "--on-error", "fail")
    write_images("split/train", {"a": 2, "b": 2})
    write_images("split/test", {"a": 3, "b": 3})
    assert "split, test: 6 images" in run_command(capsys, "evaluate", run, "--data", "split")
    assert "split, all: 10 images" in run_command(capsys, "evaluate", run, "--data", "split", "--split", "all")
    for data in ([], ["--data", "split"]):
        message = usage_error("evaluate", run, *data, "--split", "everything")
        assert "--split" in message
        assert "'all', got 'everything'" in message


def test_a_directory_with_some_classes_of_the_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One class is enough; a class that the run does not have is named."""
    write_images("more", {"b": 5}, size=(30, 40))
    shown = json.loads(run_command(capsys, "evaluate", run, "--data", "more", "--json"))
    assert shown["results"]["run"]["class_counts"] == [0, 5]
    write_images("more", {"b": 5, "z": 5})
    assert "'z'" in usage_error("evaluate", run, "--data", "more")
    assert "'moer' is not an existing directory" in usage_error("evaluate", run, "--data", "moer")


def test_the_directory_of_the_run_keeps_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    write_images("pics", {"a": 6, "b": 6}, size=(40, 40))
    run_command(capsys, "train", "./pics", MODEL, *TINY, "--image-size", "30")
    assert "pics, test: 2 images" in run_command(capsys, "evaluate", "run", "--data", "pics")
    main(["evaluate", "run", "--data", "pics", "--split", "all"])
    streams = capsys.readouterr()
    assert "pics, all: 12 images" in streams.out
    assert "trained on" in streams.err


def test_an_unsplit_test_directory_is_used_completely(capsys: pytest.CaptureFixture[str]) -> None:
    """In the size, channels and classes of the training images, also if it is evaluated again."""
    write_images("pics", {"a": 6, "b": 6, "c": 6})
    write_images("more", {"c": 4, "b": 8}, size=(40, 50))
    text = run_command(capsys, "train", "./pics", MODEL, *TINY, "--test-data", "more", "--json", "--quiet")
    assert json.loads(text)["test"]["last"]["class_counts"] == [0, 8, 4]
    main(["evaluate", "run", "--json"])
    streams = capsys.readouterr()
    assert json.loads(streams.out)["results"]["run"]["class_counts"] == [0, 8, 4]
    assert "trained on" not in streams.err
    Path("more/c/broken.png").write_bytes(b"no image")
    assert "broken.png" in usage_error("evaluate", "run", "--on-error", "fail")


def test_predict_fits_images_as_the_run_without_its_directory(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory may be on another machine, and ``--data folder`` names it, too."""
    write_images("wide", {"x": 1}, size=(20, 60))
    command = ["predict", run, "wide", "--json", "--on-error", "fail"]
    here = json.loads(run_command(capsys, *command))[0]["scores"]
    assert json.loads(run_command(capsys, *command, "--fit", "crop"))[0]["scores"] == here
    assert json.loads(run_command(capsys, *command, "--fit", "pad"))[0]["scores"] != here
    Path("pics/a/broken.png").unlink()
    Path("pics").rename("moved")
    assert json.loads(run_command(capsys, *command))[0]["scores"] == here
    run_command(capsys, "train", "--data", "folder", "--data-dir", "moved", MODEL, *TINY[:-3], "--out", "other")
    command[1] = "other"
    there = json.loads(run_command(capsys, *command))[0]["scores"]
    assert json.loads(run_command(capsys, *command, "--fit", "crop"))[0]["scores"] == there


def test_another_directory_is_read_in_the_format_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Other sizes, and a directory without images of one class."""
    write_images("pics", {"a": 5, "b": 5, "c": 5})
    main(["train", "./pics", MODEL, *TINY])
    capsys.readouterr()
    write_images("larger", {"c": 4, "a": 4}, size=(40, 50))
    shown = json.loads(run_command(capsys, "evaluate", "run", "--data", "larger", "--json"))
    assert shown["classes"] == ["a", "b", "c"]
    assert shown["results"]["run"]["class_counts"] == [4, 0, 4]


def test_balanced_accuracy_of_unbalanced_directories(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_images("more", {"a": 9, "b": 3}, seed=1)
    shown = json.loads(run_command(capsys, "evaluate", run, "--data", "more", "--json"))["results"]["run"]
    accuracies = [n / total for n, total in zip(shown["class_correct"], shown["class_counts"], strict=True)]
    assert shown["balanced_accuracy"] == pytest.approx(sum(accuracies) / 2)
    assert "balanced" in run_command(capsys, "evaluate", run, "--data", "more")
    write_images("even", {"a": 3, "b": 3})
    assert "balanced" not in run_command(capsys, "evaluate", run, "--data", "even")


def test_class_weights(capsys: pytest.CaptureFixture[str]) -> None:
    write_images("pics", {"a": 9, "b": 3})
    run_command(capsys, "train", "./pics", MODEL, *TINY, "--class-weights", "balanced")
    assert load_run("run").spec.recipe.class_weights == "balanced"
    flags = ["--data", "diverse-multimnist", "--data.source", "digits", "--class-weights", "balanced"]
    message = usage_error("train", "tsai2020_diverse_cnn", *flags, "--max-train-images", "8")
    assert "--class-weights balanced" in message


def test_larger_photographs_are_resized_and_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    write_images("pics", {"a": 5, "b": 5}, size=(120, 100))
    text = run_command(capsys, "train", "./pics", MODEL, *TINY)
    assert text.count("120x100 pixels are resized to 64x64") == 1
    assert "--image-size" in text
    text = run_command(capsys, "train", "./pics", MODEL, *TINY[:-3], "--out", "other", "--image-size", "30")
    assert "images of 1x30x30" in text
    assert load_run("other").spec.data_options == {"size": 30}


def test_predict_a_directory_as_json_and_csv_in_order(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Images in alphabetical order, with label and score; broken ones in their position, and counted."""
    main(["predict", run, "pics/b/1.png", "pics/a", "nowhere.png", "--json"])
    streams = capsys.readouterr()
    rows = json.loads(streams.out)
    names = [f"pics/a/{name}.png" for name in sorted(["broken", *map(str, range(12))])]
    assert [row["image"] for row in rows] == ["pics/b/1.png", *names, "nowhere.png"]
    assert "2 of 15 images can't be read" in streams.err
    failed = [row for row in rows if "error" in row]
    assert [row["image"] for row in failed] == ["pics/a/broken.png", "nowhere.png"]
    assert [(row["label"], row["score"]) for row in failed] == [(None, None)] * 2
    for row in (row for row in rows if "error" not in row):
        assert row["score"] == max(row["scores"].values()) == row["scores"][row["label"]]
    main(["predict", run, "pics/b/1.png", "pics/a", "nowhere.png", "--csv"])
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["image"] for line in table] == [row["image"] for row in rows]
    assert [line["label"] for line in table] == [row["label"] or "" for row in rows]
    assert all((line["score"] == "") == bool(line["error"]) for line in table)
    assert set(table[0]) == {"image", "label", "score", "score:a", "score:b", "error"}
    assert not Path(run, "predictions").exists()


def test_predict_errors(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "broken.png" in usage_error("predict", run, "pics/a", "--json", "--on-error", "fail")
    Path("empty").mkdir()
    assert "empty" in usage_error("predict", run, "empty", "--csv")
    assert "--csv" in usage_error("predict", run, "pics/a", "--csv", "--json")
    text = run_command(capsys, "predict", run, "pics/a", "pics/a", "pics/b")
    assert "pics/a/broken.png" in text  # a table of more than 20 images, without figures
    assert not Path(run, "predictions").exists()


def test_device_of_evaluation_and_prediction(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["evaluate", run], ["predict", run, "pics/b"], ["analyze", run, "predictions"]):
        by_flag = {flag: run_command(capsys, *command, "--json", "--device", flag) for flag in ("auto", "cpu")}
        assert torch.cuda.is_available() or torch.mps.is_available() or by_flag["auto"] == by_flag["cpu"]
        unavailable = "mps" if torch.cuda.is_available() else "cuda"
        assert f"--device {unavailable}" in usage_error(*command, "--device", unavailable)


def test_training_images_are_one_directory_of_a_valid_size() -> None:
    write_images("pics", {"a": 6, "b": 6})
    write_images("more", {"a": 6, "b": 6})
    message = usage_error("train", "./pics", "./more")
    assert "'./pics'" in message
    assert "'./more'" in message
    for flag in ("--image-size", "--data.size"):
        assert f"{flag} must be at least 1" in usage_error("train", "./pics", flag, "0")


def test_config_file_with_a_directory_on_the_command_line(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory replaces the data of the file, and its model stays."""
    write_images("more", {"a": 6, "b": 6})
    run_command(capsys, "train", "more", "--config", "run/config.yaml", "--out", "other")
    spec = load_run("other").spec
    assert spec.model == MODEL
    assert Path(spec.recipe.data).name == "more"


def test_comparison_has_the_balanced_accuracy_of_unbalanced_classes(capsys: pytest.CaptureFixture[str]) -> None:
    def result(name: str, n_correct: int) -> TrainResult:
        test = Evaluation(10, n_correct, 1.0, [8, 2], [n_correct - 1, 1])
        return TrainResult(Path(name), StopReason.MAX_EPOCHS, 2.0, 6, 10.0, "last", {"last": test})

    _print_comparison(result("run", 5), result("run-cnn", 9))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if line[:1] == ["run"])[:4] == ["run", "accuracy", "balanced", "95"]
    assert next(line for line in lines if line[:1] == ["run-cnn"])[1:5] == ["90.00", "%", "75.00", "%"]


def test_compare_with_the_plain_cnn(capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline has the same data, seed and time."""
    write_images("pics", {"a": 6, "b": 6})
    flags = ["--compare", "cnn", "--seed", "3", "--json", "--quiet"]
    shown = json.loads(run_command(capsys, "train", "./pics", MODEL, *TINY, *flags))
    compared = shown["compared"]
    assert (compared["model"], compared["path"], compared["seed"]) == ("cnn_images", "run-cnn", 3)
    assert compared["test"]["last"]["n"] == shown["test"]["last"]["n"] == 2
    spec, other = load_run("run").spec, load_run("run-cnn").spec
    assert other.recipe.data == spec.recipe.data
    assert 60 * other.max_minutes == pytest.approx(shown["seconds"], abs=0.1)
