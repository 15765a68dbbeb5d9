"""``torchcaps evaluate`` and ``torchcaps predict``."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.commands import run_command, usage_error
from tests.data.helpers import write_png_header
from tests.training.tiny import DATA, MODEL
from torchcaps.cli import main
from torchcaps.data import create_dataset
from torchcaps.models.schedules import Constant
from torchcaps.training import RunSpec, load_run, prediction, train

pytestmark = pytest.mark.usefixtures("here")


# evaluate --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs once for all tests."""
    directory = tmp_path_factory.mktemp("trained")
    changes = {"data": DATA, "batch_size": 16, "epochs": 3, "lr_schedule": Constant(), "num_threads": 1}
    for seed in (0, 1):
        train(RunSpec.of(MODEL, seed=seed, **changes), directory / f"run{seed}", figures=False)
    return directory


@pytest.fixture
def two_runs(trained: Path) -> list[str]:
    """Copy the trained runs to the working directory."""
    names = ["run0", "run1"]
    for name in names:
        shutil.copytree(trained / name, name)
    return names


def test_evaluate_prints_accuracy_interval_classes_and_loss(
    two_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_command(capsys, "evaluate", "run0", "--num-threads", "1")
    report = json.loads(Path("run0/results.json").read_text())["test"]["last"]
    for value in (f"{100 * report['accuracy']:.2f} %", f"{report['loss']:.4f}", "predicted as"):
        assert value in text, value
    evaluation = json.loads(run_command(capsys, "evaluate", "run0", "--json"))["results"]["run0"]
    assert evaluation["n_correct"] == report["n_correct"]
    assert sum(evaluation["class_counts"]) == 30
    assert sum(map(sum, evaluation["confusion"])) == 30
    assert evaluation["interval"][0] < evaluation["accuracy"] < evaluation["interval"][1]


def test_an_ensemble_averages_the_scores(two_runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(run_command(capsys, "evaluate", *two_runs, "--json"))["results"]
    assert list(results) == ["run0", "run1", "ensemble"]
    runs = [load_run(path) for path in two_runs]
    n_correct = 0
    with torch.no_grad():
        for batch in runs[0].loader(create_dataset(DATA, "test")).epoch(0):
            scores = sum(run.model(batch.images).scores for run in runs)
            n_correct += int((scores.argmax(1) == batch.labels).sum())
    assert results["ensemble"]["n_correct"] == n_correct
    assert results["ensemble"]["loss"] == pytest.approx((results["run0"]["loss"] + results["run1"]["loss"]) / 2)


def test_evaluate_on_other_data(two_runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, heading in (
        (["--data", DATA, "--data.test", "7"], "few, test: 7 images"),
        (["--split", "train"], "few, train: 70 images"),
        (["--data", "digits", "--max-images", "40"], "digits, test: 40 images"),
    ):
        assert heading in run_command(capsys, "evaluate", "run0", *arguments)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("evaluate run0 --data affnist-style --data.source digits", ["run0", "1x28x28", "affnist-style", "1x40x40"]),
        ("evaluate run0 --weights best", ["run0", "--val-fraction"]),
        ("evaluate run0 --weights ema", ["run0", "EMA", "--eval-weights last"]),
        ("evaluate run0 --weights bset", ["--weights", "last, best, ema", "'bset'"]),
        ("predict run0 x.png --weights bset", ["--weights", "last, best, ema", "'bset'"]),
        ("evaluate nowhere", ["'nowhere'"]),
        ("evaluate run0 --num-threads 0", ["--num-threads", "at least 1", "0"]),
        ("evaluate run0 --max-images -5", ["--max-images", "at least 1", "-5"]),
        ("evaluate run0 run0", ["run0, run0"]),
        ("evaluate run0 ./run0/", ["run0, ./run0/"]),
        ("predict run0 --polarty inverted x.png", ["--polarty", "--polarity"]),
        ("predict nowhere digit.png", ["'nowhere'"]),
    ],
)
def test_errors_name_flag_and_value(two_runs: list[str], arguments: str, parts: list[str]) -> None:
    message = usage_error(*arguments.split())
    assert [part for part in parts if part not in message] == [], message


def test_train_on_expanded_digits_and_evaluate_on_affine_ones(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--data expanded-mnist --data.source digits --steps 1 --out run --num-threads 1 --max-test-images 20"
    run_command(capsys, "train", MODEL, *flags.split())
    other = ["--data", "affnist-style", "--data.source", "digits", "--max-images", "50"]
    assert "affnist-style, test: 50 images" in run_command(capsys, "evaluate", "run", *other)


# predict ---------------------------------------------------------------------------------------------------


@pytest.fixture
def digit() -> Image.Image:
    image, _ = create_dataset("digits", "test")[350]
    return Image.fromarray((image[0] * 255).to(torch.uint8).numpy())


def test_predict_gives_scores_and_reconstruction(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    digit.save("digit.png")
    text = run_command(capsys, "predict", "run0", "digit.png")
    (row,) = json.loads(run_command(capsys, "predict", "run0", "digit.png", "--json", "--out", "figures"))
    assert text.startswith(f"digit.png: {row['classes'][0]}")
    assert max(row["scores"], key=row["scores"].get) == row["classes"][0]
    assert "█" in text
    assert [Path(path).name for path in row["figures"]] == ["digit.png", "digit-reconstruction.png"]
    Path("other").mkdir()
    digit.save("other/digit.png")
    files = ["digit.png", "other/digit.png", "--json", "--out", "figures"]
    rows = json.loads(run_command(capsys, "predict", "run0", *files))
    assert [Path(row["figures"][0]).name for row in rows] == ["digit.png", "digit-2.png"]
    with Image.open("run0/predictions/digit-reconstruction.png") as image:
        assert image.size == (28, 28)
    run0 = load_run("run0")
    with torch.no_grad():
        scores = run0.model(create_dataset("digits", "test")[350][0][None]).scores[0]
    assert list(row["scores"].values()) == pytest.approx(scores.tolist())


def test_predict_converts_size_mode_and_polarity(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network's input stays nearly the same for 16 bits, colours, transparency, large and wide, dark on paper."""
    monkeypatch.setattr(prediction, "CENTERED_DIGITS", (DATA,))
    large = digit.resize((280, 280), Image.Resampling.BILINEAR)
    paper = Image.new("RGB", (600, 300), "white")
    paper.paste(Image.eval(large, lambda p: 255 - p).convert("RGB"), (250, 10))
    black_ink = Image.new("RGBA", (280, 280), (0, 0, 0, 0))
    black_ink.putalpha(large)
    white_ink = Image.new("RGBA", (280, 280), (255, 255, 255, 0))
    white_ink.putalpha(large)
    light = torch.linspace(140, 230, 320).expand(300, 320).clone()  # paper that is darker on the left
    light[10:290, 20:300] *= 1 - torch.tensor(list(large.tobytes())).view(280, 280) / 255 * 0.8
    shaded = Image.fromarray((light + 6 * torch.rand(300, 320)).to(torch.uint8).numpy())
    sixteen_bits = (torch.tensor(list(digit.tobytes())).view(28, 28) * 257).to(torch.uint16)
    files = {
        "plain.png": digit,
        "sixteen.png": Image.fromarray(sixteen_bits.numpy()),
        "color.png": digit.convert("RGB"),
        "large.png": large,
        "paper.jpg": paper,
        "ink.png": black_ink,
        "white.png": white_ink,
        "shaded.png": shaded,
    }
    for name, image in files.items():
        image.save(name)
    notes = {row["image"]: row["note"] for row in json.loads(run_command(capsys, "predict", "run0", *files, "--json"))}
    run0 = load_run("run0")
    expected = prediction.predict(run0, "plain.png").image.flatten()
    for name in files:
        pixels = prediction.predict(run0, name).image.flatten()
        if name in ("sixteen.png", "color.png"):
            torch.testing.assert_close(pixels, expected, rtol=0, atol=0, msg=name)
        assert torch.corrcoef(torch.stack([pixels, expected]))[0, 1] > 0.85, name
    inverted = {name for name, note in notes.items() if "inverted" in note}
    assert inverted == {"paper.jpg", "ink.png", "shaded.png"}
    assert notes["plain.png"] == ""
    (row,) = json.loads(run_command(capsys, "predict", "run0", "paper.jpg", "--polarity", "as-is", "--json"))
    assert "inverted" not in row["note"]
    assert "centred" in row["note"]


def test_files_that_are_not_images_are_reported_and_the_others_classified(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    digit.save("digit.png")
    Path("words.png").write_text("not an image")
    Path("cut.png").write_bytes(Path("digit.png").read_bytes()[:100])
    Path("empty.png").write_bytes(b"")
    Image.new("L", (50, 50), 200).save("blank.png")
    for name in ("words.png", "cut.png", "empty.png", "blank.png", "nowhere.png"):
        assert name in usage_error("predict", "run0", name, "--json")
    for side in (9000, 20_000):  # Pillow itself rejects the second
        write_png_header(Path("bomb.png"), side, side)
        assert "64 megapixels" in usage_error("predict", "run0", "bomb.png", "--json")
    assert "0.0001 megapixels" in usage_error("predict", "run0", "digit.png", "--json", "--max-megapixels", "1e-4")
    assert "max_megapixels" in usage_error("predict", "run0", "digit.png", "--json", "--max-megapixels", "90")
    capsys.readouterr()
    main(["predict", "run0", "words.png", "digit.png", "--json"])
    printed = capsys.readouterr()
    problem, prediction = json.loads(printed.out)
    assert prediction["image"] == "digit.png"
    assert problem == {"image": "words.png", "label": None, "score": None, "error": problem["error"]}
    assert "1 of 2" in printed.err
    assert problem["error"] in printed.err
