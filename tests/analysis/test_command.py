"""``torchcaps analyze``: every registered analysis as a figure, a table and JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from tests.cli.commands import run_command, usage_error
from tests.data.writers import dsprites
from tests.sampling import sample
from torchcaps import analysis
from torchcaps._core.stats import wilson_interval
from torchcaps.analysis import ANALYSES, list_analyses
from torchcaps.cli import main
from torchcaps.data import create_dataset
from torchcaps.data.datasets.dsprites import FILE
from torchcaps.training import RunSpec, load_run, train
from torchcaps.training.setup import limit_images

NARROW: dict[str, Any] = {"width": 4, "types": 2, "dim": 4, "hidden": (8,), "batch_size": 16, "num_threads": 1}
TWO_DIGITS = {"data": "multimnist", "data_options": {"source": "digits"}, "max_train_images": 40}
THREADS = ("--num-threads", "1")
# Options that make an analysis quick.
QUICK = {
    "attack": ("--eps", "16"),
    "gan": ("--epochs", "1", "--width", "0.05", "--max-train-images", "100", "--images-per-class", "1"),
    "logits": ("--iterations", "2"),
    "universal": ("--iterations", "2", "--max-train-images", "20"),
}
RANDOM = ("gan", "segmentation", "universal")
COMPARING = [name for name in list_analyses() if ANALYSES.get(name).compares_models]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs of a few steps."""
    directory = tmp_path_factory.mktemp("runs")
    specs = {
        "one": RunSpec.of("capsnet_small", **NARROW, max_train_images=200, max_test_images=60, steps=3),
        "other": RunSpec.of("capsnet_small", **NARROW, max_train_images=200, max_test_images=60, steps=2, seed=1),
        "no_decoder": RunSpec.of(
            "capsnet_small", **NARROW, max_train_images=50, max_test_images=20, steps=1, reconstruction=False
        ),
        "cnn": RunSpec.of(
            "sabour2017_cnn_mnist", data="digits", batch_size=8, num_threads=1, width=4, max_train_images=50,
            max_test_images=8, steps=1, features=(8, 8),
        ),
        "two_digits": RunSpec.of("sabour2017_multimnist", **(NARROW | TWO_DIGITS), max_test_images=20, steps=1),
    }  # fmt: skip
    dsprites(directory / "data" / "dsprites" / FILE, scales=3)
    sprites: dict[str, Any] = {
        "data": "dsprites", "data_dir": str(directory / "data"), "augmentation": "", "batch_size": 8, "num_threads": 1,
        "max_train_images": 40, "max_test_images": 20, "steps": 1, "channels": (4, 4, 4),
    }  # fmt: skip
    specs["sprites"] = RunSpec.of("capsnet_images", **sprites, types=2, dim=4)
    specs["sprites_cnn"] = RunSpec.of("cnn_images", **sprites)
    for name, spec in specs.items():
        train(spec, directory / name, figures=False)
    return {name: str(directory / name) for name in specs}


def run_for(runs: dict[str, str], name: str) -> str:
    return runs[{"segmentation": "two_digits", "pose": "sprites"}.get(name, "one")]


def quick_options(name: str) -> tuple[str, ...]:
    images = () if ANALYSES.get(name).n_images is None else ("--max-images", "10")
    return (*THREADS, *images, *QUICK.get(name, ()))


def untitled_axes(figure: Figure) -> list[str]:
    """Return the axes of a figure with numbers but without a title; those with names explain themselves."""
    found = []
    for number, axes in enumerate(figure.axes):
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            texts = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
            has_numbers = any(re.fullmatch(r"[−-]?[\d.]+|\$.*\$", text) for text in texts)
            if has_numbers and axis.get_visible() and not axis.label.get_text():
                found.append(f"{axis.axis_name} of axes {number}: {texts}")
    return found


@pytest.mark.parametrize("name", sample(list_analyses(), 6, seed=1))
def test_every_analysis_prints_a_table_and_writes_a_figure(
    name: str,
    runs: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    savefig, untitled = Figure.savefig, []

    def save(figure: Figure, *args: Any, **options: Any) -> None:
        savefig(figure, *args, **options)
        untitled.append(untitled_axes(figure))

    monkeypatch.setattr(Figure, "savefig", save)
    out = tmp_path / "new" / "directory" / f"{name}.png"
    printed = run_command(capsys, "analyze", run_for(runs, name), name, "--out", str(out), *quick_options(name))
    with Image.open(out) as image:
        assert min(image.size) > 200
    assert str(out) in printed
    assert len(printed.splitlines()) < 30
    assert untitled
    assert not any(untitled), untitled


@pytest.mark.parametrize("name", list_analyses())
def test_every_analysis_prints_json(name: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = run_for(runs, name)
    report = json.loads(run_command(capsys, "analyze", path, name, "--json", *quick_options(name)))
    assert report["analysis"] == name
    assert sorted(report["options"]) == sorted(ANALYSES.get(name).flags)
    assert report["figures"] == []
    assert not (Path(path) / "figures" / f"{name}.png").exists()
    values = [value for row in report["rows"].values() for value in row.values() if isinstance(value, float)]
    assert len(values) > 0
    assert max(map(abs, values)) < 1e3
    if name in RANDOM:
        again = json.loads(run_command(capsys, "analyze", path, name, "--json", *quick_options(name)))
        assert again == report


def test_the_default_figure_is_in_the_run_directory(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_command(capsys, "analyze", "--max-images", "4", runs["one"], "--num-threads", "1", "dead")
    out = Path(runs["one"]) / "figures" / "dead.png"
    assert str(out) in printed
    assert out.stat().st_size > 0


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_selects_the_format(
    suffix: str, magic: bytes, runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"figure.{suffix}"
    run_command(capsys, "analyze", runs["one"], "dead", "--out", str(out), *quick_options("dead"))
    assert out.read_bytes()[: len(magic)] == magic


@pytest.mark.parametrize("name", COMPARING)
def test_several_runs_are_compared(name: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = ("sprites", "sprites_cnn") if name == "pose" else ("one", "other")
    words = ["analyze", *(runs[run] for run in names), name, "--json", *quick_options(name)]
    report = json.loads(run_command(capsys, *words))
    rows = " ".join(report["rows"])
    assert list(report["runs"]) == list(names)
    assert [run in rows for run in names] == [True, True]


def test_an_analysis_may_write_several_figures(
    runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, samples = tmp_path / "figure.png", tmp_path / "figure-images.png"
    words = ["analyze", runs["one"], "--out", str(out), runs["other"], "gan", *quick_options("gan")]
    printed = run_command(capsys, *words)
    assert [str(path) in printed for path in (out, samples)] == [True, True]
    assert [path.exists() for path in (out, samples)] == [True, True]


def test_values_are_those_of_the_python_function(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(runs["one"])
    dataset = limit_images(create_dataset("digits", "test"), 16)
    (batch,) = run.loader(dataset).epoch(0)
    expected = analysis.attack(run.model, batch.images, batch.labels, "pgd", eps=2 / 255, seed=5)
    words = ("--data", "digits", *THREADS, "--json", "--max-images")
    options = ("--eps", "2", "--method", "pgd", "--seed", "5")
    report = json.loads(run_command(capsys, "analyze", runs["one"], "attack", *words, "16", *options))
    assert report["images"] == 16
    row = report["rows"]["one"]
    assert (row["clean_accuracy"], row["accuracy"]) == (expected.clean_accuracy, expected.accuracy)
    assert row["interval"] == list(wilson_interval(round(16 * expected.accuracy), 16))
    assert report["options"] == {"method": "pgd", "eps": 2, "iterations": None, "source": None, "seed": 5}
    all_images = json.loads(run_command(capsys, "analyze", runs["one"], "dead", *words, "100000"))
    assert all_images["images"] == len(create_dataset("digits", "test"))


def test_an_attack_by_the_gradients_of_another_run(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--source", runs["cnn"], "--method", "bim", "--iterations", "2", "--max-images", "10", *THREADS)
    report = json.loads(run_command(capsys, "analyze", runs["one"], "attack", *options, "--json"))
    assert report["options"]["source"] == runs["cnn"]
    assert report["options"]["method"] == "bim"


def test_the_class_of_a_perturbation_is_an_option(runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", runs["one"], "perturbation", "--class-name", "7", *THREADS, "--json"]
    assert json.loads(run_command(capsys, *words))["class"] == "7"
    assert "'7'" in usage_error(*words, "--max-images", "1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["{one}", "perturbaton"], ["'perturbaton'", *list_analyses()]),
        (["{one}"], ["name of the analysis", "RUN NAME"]),
        (["dead", "--threshold", "0.1"], ["run directory", "RUN dead"]),
        (["perturbation", "{one}"], ["RUN perturbation"]),
        (["nowhere", "affine"], ["'nowhere'"]),
        (["{one}", "{other}", "dead"], ["dead", "2", *COMPARING]),
        (["{one}", "{one}", "affine"], ["{one}"]),
        (["{one}", "dead", "--out", "fig.jpg"], ["--out", ".png", "'fig.jpg'"]),
        (["{one}", "dead", "--out", "fig"], ["--out", "'fig'"]),
        (["{one}", "dead", "--max-images", "0"], ["--max-images", "0"]),
        (["{one}", "gan", "--max-images", "5"], ["--max-images", "gan"]),
        (["{one}", "gan", "--epochs", "0"], ["epochs", "0"]),
        (["{one}", "dead", "--eps", "8"], ["--eps", "attack, universal", "dead"]),
        (["{one}", "dead", "--depth", "8"], ["--depth"]),
        (["{one}", "dead", "--threshold", "2"], ["threshold", "2"]),
        (["{one}", "dead", "--data", "cifra10"], ["'cifra10'", "'cifar10'"]),
        (["{one}", "dead", "--data", "affnist-style", "--data.source", "digits"], ["1x40x40"]),
        (["{one}", "pose"], ["digits", "--data dsprites"]),
        (["{one}", "pose", "--n-train", "0"], ["--n-train", "0"]),
        (["{one}", "attack", "--iterations", "3"], ["--iterations", "fgsm"]),
        (["{one}", "attack", "--eps", "999"], ["--eps", "0..255", "999"]),
        (["{one}", "attack", "--eps", "-1"], ["eps"]),
        (["{one}", "attack", "--method", "cw"], ["--method"]),
        (["{one}", "perturbation", "--class-name", "seven"], ["class_name", "'seven'"]),
        (["{one}", "alignment", "--before-tanh"], ["before_tanh", "Attention"]),
        (["{one}", "segmentation"], ["segmentation", "capsnet_small"]),
        (["{no_decoder}", "perturbation"], ["decoder", "--reconstruction"]),
        (["{cnn}", "couplings"], ["sabour2017_cnn_mnist"]),
        (["{cnn}", "logits"], ["sabour2017_cnn_mnist"]),
        (["{two_digits}", "universal", "--max-train-images", "9"], ["sabour2017_multimnist"]),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(
    words: list[str], named: list[str], runs: dict[str, str]
) -> None:
    message = usage_error("analyze", *(word.format(**runs) for word in words), *THREADS)
    assert [part for part in named if part.format(**runs) not in message] == [], message


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *words, "--help"])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_lists_every_analysis_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    for name in list_analyses():
        declared = ANALYSES.get(name)
        flags = [f"--{option.replace('_', '-')}" for option in declared.flags]
        assert [part for part in (name, declared.description, *flags) if part not in text] == []


@pytest.mark.parametrize("name", list_analyses())
def test_help_of_an_analysis_has_its_options_and_defaults(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, name)
    declared = ANALYSES.get(name)
    for option in declared.flags:
        assert f"--{option.replace('_', '-')}" in text
    if declared.n_images is not None:
        assert f"{declared.n_images:,}" in text


def test_figures_have_the_names_of_the_classes(runs: dict[str, str], tmp_path: Path) -> None:
    run = load_run(runs["one"])
    (batch,) = run.loader(create_dataset("digits", "test").subset(torch.arange(4))).epoch(0)
    names = [f"the digit {label}" for label in range(10)]
    result = analysis.find_trajectories(run.model, batch.images, batch.labels)
    assert isinstance(result, analysis.Trajectories)
    analysis.draw_trajectories(result, tmp_path / "figure.svg", classes=names)
    assert names[result.labels[0]] in (tmp_path / "figure.svg").read_text()  # as a comment next to the glyphs
    sweep = analysis.affine_sweep(run.model, batch.images, batch.labels, ["rotation"], {"rotation": [0.0]})
    assert isinstance(sweep, analysis.AffineSweep)
    assert sweep.n == 4
