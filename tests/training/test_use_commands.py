"""``torchcaps evaluate`` and ``torchcaps predict``, as a person and as a script would use them."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.commands import refusal, run
from tests.training.own import DATA, MODEL
from torchcaps.cli import main
from torchcaps.data import create_dataset
from torchcaps.training import load_run, predict

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--data", DATA, "--batch-size", "16", "--num-threads", "1"]

pytestmark = pytest.mark.usefixtures("here")


# evaluate --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_runs(capsys: pytest.CaptureFixture[str]) -> list[str]:
    for seed in ("0", "1"):
        words = ["--epochs", "3", "--seed", seed, "--out", f"run{seed}", "--lr-schedule", "constant"]
        run(capsys, "train", MODEL, *FEW, *words)
    return ["run0", "run1"]


def test_evaluate_tells_accuracy_interval_classes_and_loss(
    two_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "evaluate", "run0", "--num-threads", "1")
    report = json.loads(Path("run0/results.json").read_text())["test"]["last"]
    assert f"{100 * report['accuracy']:.2f} %" in text
    assert f"{report['loss']:.4f}" in text
    assert "taken for" in text
    found = json.loads(run(capsys, "evaluate", "run0", "--json"))["results"]["run0"]
    assert found["n_right"] == report["n_right"]
    assert sum(found["seen"]) == 30
    assert sum(map(sum, found["confusion"])) == 30
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]


def test_runs_together_are_the_mean_of_their_scores(two_runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "evaluate", *two_runs, "--json"))["results"]
    assert list(found) == ["run0", "run1", "together"]
    runs = [load_run(path) for path in two_runs]
    right = 0
    with torch.no_grad():
        for batch in runs[0].loader(create_dataset(DATA, "test")).epoch(0):
            scores = sum(run.model(batch.images).scores for run in runs)
            right += int((scores.argmax(1) == batch.labels).sum())
    assert found["together"]["n_right"] == right
    assert found["together"]["loss"] == pytest.approx((found["run0"]["loss"] + found["run1"]["loss"]) / 2)


def test_evaluate_takes_other_data_that_fits(two_runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "evaluate", "run0", "--data", DATA, "--data.test", "7")
    assert "few, test: 7 images" in text
    assert "few, train: 70 images" in run(capsys, "evaluate", "run0", "--split", "train")
    assert "digits, test: 40 images" in run(capsys, "evaluate", "run0", "--data", "digits", "--max-test-images", "40")
    said = refusal("evaluate", "run0", "--data", "affnist-style", "--data.source", "digits")
    assert "run0 is for images of 1x28x28, and affnist-style has images of 1x40x40" in said
    assert "run0 has no best checkpoint" in refusal("evaluate", "run0", "--weights", "best")
    assert "'nowhere' is no run" in refusal("evaluate", "nowhere")
    assert "--weights" in refusal("evaluate", "run0", "--weights", "bset")
    assert "--weights" in refusal("predict", "run0", "x.png", "--weights", "bset")
    assert "--num-threads must be 1 or more, got 0" in refusal("evaluate", "run0", "--num-threads", "0")
    assert "--max-test-images must be 1 or more" in refusal("evaluate", "run0", "--max-test-images", "-5")
    assert "each run once" in refusal("evaluate", "run0", "run0")
    assert "each run once" in refusal("evaluate", "run0", "./run0/")
    assert "there is no flag --polarty" in refusal("predict", "run0", "--polarty", "inverted", "x.png")
    assert "has no EMA weights" in refusal("evaluate", "run0", "--weights", "ema")


def test_training_on_expanded_digits_and_testing_on_affine_ones(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--data",
        "expanded-mnist",
        "--data.source",
        "digits",
        "--steps",
        "1",
        "--out",
        "run",
        "--num-threads",
        "1",
    ]
    run(capsys, "train", MODEL, *words, "--max-test-images", "20")
    other = ["--data", "affnist-style", "--data.source", "digits", "--max-test-images", "50"]
    assert "affnist-style, test: 50 images" in run(capsys, "evaluate", "run", *other)


# predict ---------------------------------------------------------------------------------------------------


@pytest.fixture
def digit() -> Image.Image:
    image, _ = create_dataset("digits", "test")[350]
    return Image.fromarray((image[0] * 255).to(torch.uint8).numpy())


@pytest.mark.usefixtures("figures")
def test_predict_shows_the_class_the_lengths_and_the_reconstruction(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    digit.save("digit.png")
    text = run(capsys, "predict", "run0", "digit.png")
    (found,) = json.loads(run(capsys, "predict", "run0", "digit.png", "--json", "--out", "pictures"))
    assert text.startswith(f"digit.png: {found['classes'][0]}")
    assert max(found["scores"], key=found["scores"].get) == found["classes"][0]
    assert "█" in text
    assert [Path(path).name for path in found["pictures"]] == ["digit.png", "digit-reconstruction.png"]
    Path("other").mkdir()
    digit.save("other/digit.png")
    rows = json.loads(run(capsys, "predict", "run0", "digit.png", "other/digit.png", "--json", "--out", "pictures"))
    assert [Path(row["pictures"][0]).name for row in rows] == ["digit.png", "digit-2.png"]
    with Image.open("run0/predictions/digit-reconstruction.png") as picture:
        assert picture.size == (28, 28)
    run0 = load_run("run0")
    with torch.no_grad():
        scores = run0.model(create_dataset("digits", "test")[350][0][None]).scores[0]
    assert list(found["scores"].values()) == pytest.approx(scores.tolist())


def test_photographs_of_other_sizes_modes_and_polarity_are_brought_into_form(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digit stays what it is: as 16 bits, with colours, transparent, large and wide, dark on paper."""
    monkeypatch.setattr(predict, "MNIST_LIKE", (DATA,))
    large = digit.resize((280, 280), Image.Resampling.BILINEAR)
    paper = Image.new("RGB", (600, 300), "white")
    paper.paste(Image.eval(large, lambda p: 255 - p).convert("RGB"), (250, 10))
    see_through = Image.new("RGBA", (280, 280), (0, 0, 0, 0))
    see_through.putalpha(large)
    white = Image.new("RGBA", (280, 280), (255, 255, 255, 0))
    white.putalpha(large)
    light = torch.linspace(140, 230, 320).expand(300, 320).clone()  # paper that is darker at the left
    light[10:290, 20:300] *= 1 - torch.tensor(list(large.tobytes())).view(280, 280) / 255 * 0.8
    shaded = Image.fromarray((light + 6 * torch.rand(300, 320)).to(torch.uint8).numpy())
    pictures = {
        "plain.png": digit,
        "sixteen.png": Image.fromarray(
            (torch.tensor(list(digit.tobytes())).view(28, 28) * 257).to(torch.uint16).numpy()
        ),
        "colour.png": digit.convert("RGB"),
        "large.png": large,
        "paper.jpg": paper,
        "ink.png": see_through,
        "white.png": white,
        "shaded.png": shaded,
    }
    for name, picture in pictures.items():
        picture.save(name)
    found = {row["image"]: row for row in json.loads(run(capsys, "predict", "run0", *pictures, "--json"))}
    net = load_run("run0")
    wanted = predict.predict(net, "plain.png").image.flatten()
    for name in pictures:
        seen = predict.predict(net, name).image.flatten()
        if name in ("sixteen.png", "colour.png"):
            assert torch.equal(seen, wanted), name
        assert torch.corrcoef(torch.stack([seen, wanted]))[0, 1] > 0.85, name
    assert "inverted" in found["paper.jpg"]["note"]
    assert "inverted" in found["ink.png"]["note"]
    assert found["plain.png"]["note"] == ""
    (kept,) = json.loads(run(capsys, "predict", "run0", "paper.jpg", "--polarity", "as-is", "--json"))
    assert kept["note"] == "its ink centred, as MNIST's is"


def test_what_is_no_image_is_refused_with_a_reason_and_the_rest_is_done(
    two_runs: list[str], digit: Image.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    digit.save("digit.png")
    Path("words.png").write_text("not an image")
    Path("cut.png").write_bytes(Path("digit.png").read_bytes()[:100])
    Image.new("L", (50, 50), 200).save("blank.png")
    reasons = {
        "words.png": "words.png can't be read as an image",
        "cut.png": "cut.png can't be read as an image",
        "blank.png": "blank.png is one colour all over: there is nothing to see in it",
        "nowhere.png": "nowhere.png is no file",
    }
    for name, reason in reasons.items():
        assert reason in refusal("predict", "run0", name, "--json")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["predict", "run0", "words.png", "digit.png", "--json"])
    printed = capsys.readouterr()
    fine, wrong = json.loads(printed.out)
    assert fine["image"] == "digit.png"
    assert wrong == {"image": "words.png", "error": wrong["error"]}
    assert "words.png can't be read" in printed.err
    assert "is no run" in refusal("predict", "nowhere", "digit.png")
