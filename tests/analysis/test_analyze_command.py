"""``torchcaps analyze``, as a person and as a script would use it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchcaps.cli.kinds import KINDS

from tests.commands import refusal
from tests.commands import run as command
from tests.tolerances import SAME, relative_rms
from torchcaps import analysis
from torchcaps.analysis.attacks import judge
from torchcaps.cli import main
from torchcaps.data import (
    CenterCrop,
    Loader,
    Normalize,
    Pipeline,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    create_dataset,
)
from torchcaps.metrics import wilson_interval
from torchcaps.training import RunSpec, load_run, train
from torchcaps.training.setup import limit_images

NARROW: dict[str, Any] = {"width": 4, "types": 2, "dim": 4, "hidden": (8,), "batch_size": 16, "num_threads": 1}
TWO = {"data": "multimnist", "data_options": {"source": "digits"}, "max_train_images": 40}
FEW = ("--num-threads", "1", "--images", "10")
# What makes each kind quick.
QUICK = {
    "attack": ("--eps", "16"),
    "gan": ("--epochs", "1", "--width", "0.05", "--train-images", "100"),
    "logits": ("--iterations", "2"),
    "universal": ("--iterations", "2", "--train-images", "20"),
}

CHANCE = ("gan", "segmentation", "universal")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs that have learnt next to nothing."""
    folder = tmp_path_factory.mktemp("runs")
    specs = {
        "one": RunSpec.of("capsnet_small", **NARROW, max_train_images=200, max_test_images=60, steps=3),
        "other": RunSpec.of("capsnet_small", **NARROW, max_train_images=200, max_test_images=60, steps=2, seed=1),
        "bare": RunSpec.of(
            "capsnet_small", **NARROW, max_train_images=50, max_test_images=20, steps=1, reconstruction=False
        ),
        "cnn": RunSpec.of(
            "sabour2017_cnn_mnist", data="digits", batch_size=8, num_threads=1, width=4, max_train_images=50,
            max_test_images=8, steps=1, features=(8, 8),
        ),
        "two": RunSpec.of("sabour2017_multimnist", **(NARROW | TWO), max_test_images=20, steps=1),
    }  # fmt: skip
    for name, spec in specs.items():
        train(spec, folder / name, pictures=False)
    return {name: str(folder / name) for name in specs}


def of(runs: dict[str, str], kind: str) -> str:
    return runs["two" if kind == "segmentation" else "one"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_and_tells(
    kind: str, runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / f"{kind}.png"
    said = command(capsys, "analyze", of(runs, kind), kind, "--out", str(out), *FEW, *QUICK.get(kind, ()))
    with Image.open(out) as image:
        assert min(image.size) > 200
    assert f"written: {out}" in said
    assert len(said.splitlines()) < 30


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_speaks_to_machines(kind: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = of(runs, kind)
    found = json.loads(command(capsys, "analyze", path, kind, "--json", *FEW, *QUICK.get(kind, ())))
    assert found["kind"] == kind
    assert found["figures"] == []
    assert not (Path(path) / "figures" / f"{kind}.png").exists()
    numbers = [value for row in found["numbers"].values() for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(abs(value) < 1e3 for value in numbers)
    if kind in CHANCE:
        again = json.loads(command(capsys, "analyze", path, kind, "--json", *FEW, *QUICK.get(kind, ())))
        assert again == found


def test_the_figure_goes_to_the_runs_pictures(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    said = command(capsys, "analyze", "--images", "4", runs["one"], "--num-threads", "1", "dead")
    out = Path(runs["one"]) / "figures" / "dead.png"
    assert said.endswith(f"written: {out}\n")
    assert out.stat().st_size > 0


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_the_ending_says_what_the_figure_is(
    ending: str, runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"fig.{ending}"
    command(capsys, "analyze", runs["one"], "dead", "--out", str(out), *FEW)
    assert {"svg": b"<?xml", "pdf": b"%PDF"}[ending] == out.read_bytes()[: 5 if ending == "svg" else 4]


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.several])
def test_runs_are_compared(kind: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", runs["one"], runs["other"], kind, "--json", *FEW, *QUICK.get(kind, ())]
    found = json.loads(command(capsys, *words))
    names = " ".join(found["numbers"])
    assert list(found["runs"]) == ["one", "other"]
    assert "one" in names
    assert "other" in names


def test_runs_are_drawn_together(runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fig.png"
    words = ["analyze", runs["one"], "--out", str(out), runs["other"], "gan", *FEW, *QUICK["gan"]]
    said = command(capsys, *words)
    assert said.endswith(f"written: {out}\nwritten: {tmp_path / 'fig-images.png'}\n")
    assert out.exists()
    assert (tmp_path / "fig-images.png").exists()


def test_numbers_are_those_of_the_analysis(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(runs["one"])
    dataset = limit_images(create_dataset("digits", "test"), 16)
    (batch,) = run.loader(dataset).epoch(0)
    by_hand = analysis.attack(run.model, batch.images, batch.labels, "pgd", eps=2 / 255, seed=5)
    words = ("--data", "digits", "--num-threads", "1", "--json", "--images", "16", "--eps", "2", "--method", "pgd")
    found = json.loads(command(capsys, "analyze", runs["one"], "attack", *words, "--seed", "5"))
    assert found["images"] == 16
    numbers = found["numbers"]["one"]
    assert (numbers["clean"], numbers["attacked"]) == (by_hand.clean_accuracy, by_hand.accuracy)
    assert numbers["interval"] == list(wilson_interval(round(16 * by_hand.accuracy), 16))
    assert (found["method"], found["eps"], found["source"]) == ("pgd", 2, None)
    more = json.loads(command(capsys, "analyze", runs["one"], "dead", *words[:6], "100000"))
    assert more["images"] == len(create_dataset("digits", "test"))


def test_an_attack_by_another_run(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", runs["one"], "attack", "--source", runs["cnn"], "--method", "bim", "--iterations", "2", *FEW]
    found = json.loads(command(capsys, *words, "--json"))
    assert found["source"] == runs["cnn"]
    assert found["method"] == "bim"


def test_the_class_is_the_one_asked_for(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", runs["one"], "perturbation", "--class", "7", "--num-threads", "1"]
    assert json.loads(command(capsys, *words, "--json"))["class"] == "7"
    assert "none of these 1 images is of the class" in refusal(*words[:-2], "--images", "1", "--json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{one}", "perturbaton"], "one of perturbation, reconstruction, segmentation, alignment, cosines, directions"),
        (["{one}"], "required: kind"),
        (["perturbation", "{one}"], "the kind comes last: torchcaps analyze RUN perturbation"),
        (["nowhere", "affine"], "'nowhere' is no run"),
        (["{one}", "{other}", "dead"], "dead is of one run, got 2: those that compare several are logits, affine"),
        (["{one}", "{one}", "affine"], "each run once"),
        (["{one}", "dead", "--out", "fig.jpg"], "--out must end in .png, .svg or .pdf, got 'fig.jpg'"),
        (["{one}", "dead", "--out", "fig"], "--out must end in .png, .svg or .pdf"),
        (["{one}", "dead", "--images", "0"], "--images must be 1 or more, got 0"),
        (["{one}", "dead", "--eps", "8"], "--eps is for attack, universal, not for dead"),
        (["{one}", "dead", "--depth", "8"], "there is no flag --depth"),
        (["{one}", "dead", "--threshold", "2"], "threshold must be at least 0 and below 1, got 2"),
        (["{one}", "dead", "--data", "cifra10"], "did you mean 'cifar10'"),
        (["{one}", "dead", "--data", "affnist-style", "--data.source", "digits"], "has images of 1x40x40"),
        (["{one}", "attack", "--iterations", "3"], "--iterations is for --method bim or pgd"),
        (["{one}", "attack", "--eps", "-1"], "eps must be"),
        (["{one}", "attack", "--method", "cw"], "--method"),
        (["{one}", "perturbation", "--class", "seven"], "--class must be the name of one, got 'seven'"),
        (["{one}", "alignment", "--before-tanh"], "needs class capsules by Attention routing"),
        (["{one}", "segmentation"], "segmentation needs images of several objects"),
        (["{bare}", "perturbation"], "needs a decoder"),
        (["{cnn}", "couplings"], "needs class capsules"),
        (["{cnn}", "logits"], "needs class capsules"),
        (["{two}", "universal", "--train-images", "9"], "needs one class for each image"),
    ],
)
def test_refusals_are_one_sentence(words: list[str], message: str, runs: dict[str, str]) -> None:
    assert message in refusal("analyze", *(word.format(**runs) for word in words), "--num-threads", "1")


def test_help_names_the_kinds_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "Examples: torchcaps analyze" in " ".join(said.split())
    for name, kind in KINDS.items():
        assert f"  {name}" in said
        assert kind.about in said


def test_the_names_of_classes_are_drawn(runs: dict[str, str], tmp_path: Path) -> None:
    run = load_run(runs["one"])
    (batch,) = run.loader(create_dataset("digits", "test").subset(torch.arange(4))).epoch(0)
    names = [f"the digit {number}" for number in range(10)]
    found = analysis.directions(run.model, batch.images, batch.labels)
    assert isinstance(found, analysis.Directions)
    analysis.draw_directions(found, tmp_path / "fig.svg", classes=names)
    assert names[found.labels[0]] in (tmp_path / "fig.svg").read_text()  # as a comment beside the letters
    sweep = analysis.affine_sweep(run.model, batch.images, batch.labels, ["rotation"], {"rotation": [0.0]})
    assert isinstance(sweep, analysis.AffineSweep)
    assert sweep.n == 4


# PixelNetwork ----------------------------------------------------------------------------------------------


def pipelines(shape: tuple[int, int, int]) -> dict[str, list[Any]]:
    mean = torch.rand(shape, generator=torch.Generator().manual_seed(0)) / 3
    return {
        "none": [],
        "Chen's": [ScalePixels(256), SubtractMeanImage(mean)],
        "normalised": [Normalize((0.3,), (0.2,))],
        "cut, then standardised": [CenterCrop(24), Standardize()],
        "standardised, then cut": [Standardize(), CenterCrop(24)],
    }


@pytest.mark.parametrize("name", pipelines((1, 28, 28)))
def test_a_network_on_pixels_sees_what_its_pipeline_makes_of_them(name: str, runs: dict[str, str]) -> None:
    dataset = create_dataset("digits", "test").subset(torch.arange(6))
    pipeline = Pipeline([], pipelines(dataset.shape)[name])
    model: Any = load_run(runs["one"]).model
    if "cut" in name:
        model.front[0] = torch.nn.Sequential(torch.nn.ZeroPad2d(2), model.front[0])
        model.spec = type(model.spec)(**{**vars(model.spec), "image": (1, 24, 24)})
    network = analysis.PixelNetwork(model, pipeline, dataset.shape)
    (prepared,) = Loader(dataset, 6, pipeline=pipeline, train=False).epoch(0)
    (pixels,) = Loader(dataset, 6, pipeline=network.pipeline, train=False).epoch(0)
    assert network.spec.image == pixels.images.shape[1:]
    assert network.spec.image[1] == (24 if name.startswith("cut") else 28)
    assert 0 <= float(pixels.images.min()) <= float(pixels.images.max()) <= 1
    with torch.no_grad():
        expected, found = model(prepared.images).scores, network(pixels.images).scores
    assert relative_rms(found, expected) < SAME[torch.float32]
    assert judge(network, pixels.images, pixels.labels)[0].shape == (6,)
    changed = analysis.fgsm(network, pixels.images, pixels.labels, eps=8 / 255)
    assert float((changed - pixels.images).abs().max()) == pytest.approx(8 / 255, rel=1e-4)
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1


def test_colours_before_bytes_are_numbers_have_no_bounds(runs: dict[str, str]) -> None:
    pipeline = Pipeline([], [Standardize(), ScalePixels()])
    with pytest.raises(ValueError, match="pixels with known bounds need a pipeline that makes numbers of bytes"):
        analysis.PixelNetwork(load_run(runs["one"]).model, pipeline, (1, 28, 28))
