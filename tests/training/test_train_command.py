"""``torchcaps train``, as a person and as a script would use it."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from tests.commands import refusal, run
from tests.training.own import DATA, MODEL
from torchcaps.cli import main
from torchcaps.cli.train import train_help
from torchcaps.data import Loader
from torchcaps.models.schedules import Exponential, OneCycle
from torchcaps.routing import EM, Dynamic
from torchcaps.training import RunSpec, StopReason, TrainedRun, load_run, train
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.logging import read_metrics
from torchcaps.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--data", DATA, "--batch-size", "16", "--num-threads", "1"]

pytestmark = pytest.mark.usefixtures("here")


def spec_of(folder: str) -> RunSpec:
    trained: TrainedRun = load_run(folder)
    return trained.spec


def test_a_run_says_what_it_does_and_leaves_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "train", MODEL, *FEW, "--epochs", "2", "--val-fraction", "0.2")
    assert "images of 1x28x28, 10 classes" in text
    assert "few: 56 training images, 14 validation images, 30 test images" in text
    assert "memory: about " in text
    assert "epoch    2/2" in text
    assert not {"\x1b", "\r"} & set(text)  # plain lines: nobody looks
    assert "On the test images, by which nothing was chosen:" in text
    folder = Path("runs/Narrow-FewDigits-1")
    assert f"torchcaps predict {folder} IMAGE.png" in text
    for name in (
        "config.yaml",
        "metrics.csv",
        "results.json",
        "checkpoints/last.safetensors",
        "checkpoints/best.safetensors",
    ):
        assert (folder / name).is_file(), name
    report = json.loads((folder / "results.json").read_text())
    assert report["test"]["last"]["n"] == 30
    assert report["seed"] == 0
    assert report["machine"]["torch"] == torch.__version__
    run(capsys, "train", MODEL, *FEW, "--steps", "1")
    assert Path("runs/Narrow-FewDigits-2").is_dir()


def test_flags_and_files_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 2 --routing em --routing.iterations 3 --optimizer sgd --optimizer.lr 0.5 --loss margin --width 5"
    more = (
        "--lr-schedule exponential --lr-schedule.period 7 --max-grad-norm 2 --seed 4 --augmentation= --data.train 40 "
    )
    more += "--hidden 6,7"
    run(capsys, "train", MODEL, *FEW, *words.split(), *more.split(), "--out", "flags")
    spec = spec_of("flags")
    assert spec.model_options["routing"] == EM(3)
    assert spec.model_options["hidden"] == (6, 7)
    assert (spec.model_options["width"], spec.seed, spec.max_grad_norm) == (5, 4, 2)
    assert spec.recipe.lr_schedule == Exponential(period=7)
    assert (spec.recipe.optimizer.name, spec.recipe.optimizer.lr) == ("sgd", 0.5)
    assert (spec.recipe.loss.name, spec.recipe.augmentation) == ("margin", "")
    assert spec.data_options == {"train": 40}
    # The file of a run is a file of flags, and what is given beside it has the last word.
    run(capsys, "train", "--config", "flags/config.yaml", "--out", "again")
    assert spec_of("again") == spec
    rows, others = (read_metrics(Path(name, "metrics.csv")) for name in ("flags", "again"))
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in others]
    run(capsys, "train", "--config=flags/config.yaml", "--out", "other", "--epochs", "1", "--seed=5")
    assert (spec_of("other").seed, spec_of("other").recipe.epochs, spec_of("other").recipe.steps) == (5, 1, None)
    # A file of one's own says only what it wants to.
    mine = {
        "model": MODEL,
        "data": DATA,
        "epochs": 1,
        "routing": "dynamic",
        "optimizer": {"lr": 0.25},
        "num_threads": 1,
    }
    Path("mine.yaml").write_text(yaml.safe_dump(mine))
    run(capsys, "train", "--config", "mine.yaml", "--out", "mine")
    assert spec_of("mine").recipe.optimizer.lr == 0.25
    assert spec_of("mine").model_options["routing"] == Dynamic()


def test_what_is_not_said_is_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "train", *FEW, "--steps", "1", "--width", "4", "--types", "2", "--hidden", "8", "--out", "run")
    spec = spec_of("run")
    assert spec.model == "capsnet_small"
    assert spec.recipe.lr_schedule == OneCycle()
    assert spec.recipe.augmentation == "sabour2017.mnist"
    assert spec.recipe.optimizer.lr == 3e-3


def test_a_users_own_routing_model_and_data_by_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from tests.training.own import FewDigits, Narrow\n"
        "from torchcaps.routing import Dynamic\n"
        "@dataclass(frozen=True)\n"
        "class MyRouting(Dynamic):\n"
        "    iterations: int = 1\n"
        "    sharpness: float = 1.0\n"
        "net = Narrow(width=3)\n"
        "@dataclass(frozen=True)\n"
        "class Data(FewDigits):\n"
        "    train: int = 33\n"
    )
    words = ["mine.net", "--data", "mine.Data", "--routing", "mine.MyRouting", "--steps", "1", "--out", "run"]
    words += ["--routing.sharpness", "2"]
    assert "few: 33 to learn from" in run(capsys, "train", *words)
    model = load_run("run").model
    assert type(model.spec.routing).__name__ == "MyRouting"
    assert model.spec.routing.sharpness == 2
    assert model.spec.width == 3
    assert "mine.nothing can't be imported: mine has no 'nothing'" in refusal("train", "mine.nothing")
    assert "can't be imported: No module named 'absent'" in refusal("train", "--data", "absent.Data")
    assert "mine.Data must be a model of your own" in refusal("train", "mine.Data")


MISTAKES = {
    "capsnet_smal": "did you mean 'capsnet_small'",
    "--data digts": "did you mean 'digits'",
    "--epohcs 3": "there is no flag --epohcs: did you mean --epochs",
    "--epochs 3 --steps 3": "give --epochs or --steps, not both",
    "--epochs": "--epochs needs a value",
    "--epochs many": "epochs",
    "--epochs 0": "--epochs must be 1 or more, got 0",
    "--max-minutes 0": "--max-minutes must be over 0, got 0",
    "--max-grad-norm -1": "--max-grad-norm must be over 0, got -1",
    "--val-fraction 1.5": "--val-fraction must be a share, 0 or more and below 1, got 1.5",
    "--val-fraction 0.00001": "holds out 0 of 70 images",
    "--eval-weights best": "eval_weights 'best' needs images to choose by: hold some out with --val-fraction",
    "--early-stopping-patience 3": "--early-stopping-patience needs images to judge by",
    "--target-accuracy 0.9": "--target-accuracy needs images to judge by",
    "--target-accuracy 1.5": "--target-accuracy must be over 0 and at most 1, got 1.5",
    "--max-train-images 0": "--max-train-images must be 1 or more, got 0",
    "--image 3x28x28": "the model is for images of 3x28x28, and few has images of 1x28x28",
    "--classes 5": "the model is for 5 classes, and few has 10 classes",
    "--data multimnist --data.source digits --n_objects 1": "is for 1 objects in an image, and multimnist has 2",
    "--data diverse-multimnist --data.source digits": "is for one object in an image, and diverse-multimnist has any",
    "--augmentation tsai2020.cifar10": "the augmentation 'tsai2020.cifar10' does not fit",
    "--augmentation nothing": "augmentation must be the name of one",
    "--routing nothing": "routing must be the name of one",
    "--lr-schedule nothing": "lr_schedule must be the name of one",
    "--precision half": "precision",
    "--data.train 0": "is empty: there are no images to work with",
    "--data.trains 3": "there is no flag --data.trains: did you mean --data.train",
    "--resume nowhere": "'nowhere' is no run: there is no such folder",
    "--resume=": "'' is no run: there is no such folder",
    "--loss foo": "--loss.name: 'foo' is none of margin, spread, cross_entropy, binary",
    "--optimizer adm": "--optimizer.name: 'adm' is none of adam, sgd, rmsprop: did you mean 'adam'?",
    "--routing em --routing.iteration 3": "no flag --routing.iteration: did you mean --routing.iterations?",
    "--routing own.Dynamo": "own.Dynamo can't be imported: No module named 'own'",
    "--lr-schedule OneCycle --lr-schedule.wormup 1": "no flag --lr-schedule.wormup: did you mean --lr-schedule.warmup?",
    "--config a.yaml --config=b.yaml": "one --config at a time",
    "--resume a --resume b": "one --resume at a time",
    "--device cuda": "--device cuda: there is none here that torch could use",
    "--seed 99999999999999999999": "--seed must be",
    "--loss.margin_steps 0": "--loss.margin_steps must be 1 or more, got 0",
    "--optimizer.momentum -1": "--optimizer.momentum must be 0 or more, got -1",
    "--ascents 1": "--ascents is for Quadratic routing",
    "--deterministic capsnet_small": "one model at a time",
    "--config nothing.yaml": "nothing.yaml can't be read: No such file",
    "./nowhere": "./nowhere is no folder, and no model has that name",
    "tests.training.own.Narrow capsnet_small": "one model at a time",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_get_one_sentence_and_leave_nothing(words: str, tmp_path: Path) -> None:
    own = words.split()
    few = [] if {"--data", "--resume", "--resume=", "--config"} & set(own) else ["--data", DATA]
    named = any(not w.startswith("-") for w in own[:1]) or "--resume" in words
    assert MISTAKES[words] in refusal("train", *([] if named else [MODEL]), *few, *own)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_goes_on_takes_bounds_only(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "train", MODEL, *FEW, "--epochs", "1", "--out", "run")
    assert "--seed can't change a run that goes on" in refusal("train", "--resume", "run", "--seed", "3")
    text = run(capsys, "train", "--resume", "run", "--epochs", "2")
    assert "going on with run at step 5, epoch 1.00" in text
    assert len(read_metrics(Path("run/metrics.csv"))) == 2
    assert "run is at step 10 already: the 3 steps that it is to have lie before" in refusal(
        "train", "--resume", "run", "--steps", "3"
    )
    assert spec_of("run").recipe.epochs == 2
    assert "run holds a run already" in refusal("train", MODEL, *FEW, "--out", "run")


def test_trap_52_the_best_is_chosen_on_images_held_out_and_never_on_the_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at while training is the images held out, disjoint from the others; both are reported."""
    splits: list[str] = []
    evaluate = Trainer.evaluate

    def record(self: Trainer, loader: Loader) -> Evaluation:
        splits.append(loader.dataset.split)
        return evaluate(self, loader)

    monkeypatch.setattr(Trainer, "evaluate", record)
    spec = RunSpec.of(MODEL, data=DATA, batch_size=16, epochs=4, val_fraction=0.2, eval_weights="best", num_threads=1)
    result = train(spec, tmp_path / "run")
    assert splits[:4] == ["validation"] * 4
    assert set(splits[4:]) == {"test"}  # after the training
    rows = read_metrics(tmp_path / "run/metrics.csv")
    assert all(row["test_accuracy"] is None for row in rows)
    best = max(rows, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
    assert load_run(tmp_path / "run").step == best["step"]
    assert set(result.test_results) == {"last", "best"}
    assert result.test is result.test_results["best"]
    stopped = train(
        RunSpec.of(MODEL, data=DATA, epochs=50, val_fraction=0.2, early_stopping_patience=2, num_threads=1, seed=1),
        tmp_path / "early",
    )
    assert stopped.epochs < 50
    assert stopped.stop_reason is StopReason.EARLY_STOPPING


def test_a_folder_of_images_is_data_enough(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("bright", "dark", "mixed")):
        for n in range(8):
            pixels = (torch.rand(40, 36, 3, generator=generator) * 80 + 80 * number).to(torch.uint8)
            Path("pics", name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(f"pics/{name}/{n}.png")
    small = ["--width", "8", "--stages", "[[4, 1]]", "--types", "2", "--blocks", "1"]
    text = run(capsys, "train", "./pics", *small, "--steps", "2", "--num-threads", "1")
    assert "capsnet_images" in text
    assert "images of 3x40x36, 3 classes" in text
    assert "pics: 18 training images, 3 validation images, 3 test images" in text
    assert "memory: about" in text
    folder = "runs/capsnet_images-pics-1"
    assert Path(folder, "checkpoints/best.safetensors").is_file()
    text = run(capsys, "evaluate", folder, "--num-threads", "1")
    assert "pics, test: 3 images" in text
    assert "bright" in text
    text = run(capsys, "predict", folder, "pics/dark/0.png", "--json")
    assert set(json.loads(text)[0]["scores"]) == {"bright", "dark", "mixed"}
    assert "give the images once" in refusal("train", "./pics", "--data", "digits")


def test_a_data_folder_is_found_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("files").mkdir()
    run(capsys, "train", MODEL, *FEW, "--steps", "1", "--data-dir", "files", "--out", "run")
    assert spec_of("run").data_dir == str(Path("files").resolve())


def test_a_switch_does_not_swallow_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "train", "--reconstruction", MODEL, "--deterministic", *FEW, "--steps", "1", "--out", "run")
    torch.use_deterministic_algorithms(False)
    assert spec_of("run").model == MODEL
    assert spec_of("run").model_options["reconstruction"] is True
    run(capsys, "train", "--config", "run/config.yaml", "--deterministic", "false", MODEL, "--out", "other")
    assert not spec_of("other").deterministic
    assert spec_of("other").model == MODEL
    for text, said in (
        ("fields: 3", "fields must be a list of settings"),
        ("data_options: [1]", "data_options must be"),
    ):
        Path("odd.yaml").write_text(text)
        assert said in refusal("train", "--config", "odd.yaml")


def test_other_classes_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name, classes in (("first", "ab"), ("second", "bc")):
        for number, label in enumerate(classes):
            for n in range(4):
                Path(name, label).mkdir(parents=True, exist_ok=True)
                Image.new("L", (28, 28), 40 * n + 5 * number).save(f"{name}/{label}/{n}.png")
    run(capsys, "train", MODEL, "--data", "first", "--steps", "1", "--num-threads", "1", "--out", "run")
    assert "run knows the classes a, b, and second has b, c" in refusal("evaluate", "run", "--data", "second")


def test_tensorboard_gets_the_same_curves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(capsys, "train", MODEL, *FEW, "--epochs", "1", "--tensorboard", "--out", "run")
    (events,) = Path("run/tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = refusal("train", MODEL, *FEW, "--epochs", "1", "--tensorboard", "--out", "other")
    assert "--tensorboard needs tensorboard: pip install 'torchcaps[tensorboard]'" in said


def test_without_the_engine_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    said = refusal("train", MODEL, *FEW, "--epochs", "1")
    assert "training needs lightning_fabric: pip install 'torchcaps[train]'" in said


def test_help_needs_no_torch_and_that_of_a_model_no_engine() -> None:
    script = (
        "import sys, contextlib; from torchcaps.cli import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print('loaded:', *(name for name in ('torch', 'lightning_fabric', 'matplotlib') if name in sys.modules))"
    )
    for words, loaded in (
        (["--help"], "loaded:"),
        (["train", "--help"], "loaded:"),
        (["train", "capsnet_small", "--help"], "loaded: torch"),
    ):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == loaded


def test_the_help_of_training_is_what_the_parser_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A text beside the code, for speed: tools/help.py writes it anew."""
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    assert capsys.readouterr().out.split() == train_help().split()


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    here, there = pty.openpty()
    words = ["train", MODEL, *FEW, "--epochs", "10", "--out", str(tmp_path / "run"), "--augmentation", ""]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "torchcaps", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=there, stderr=subprocess.DEVNULL)
    os.close(there)
    seen = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(here, 65536):
            seen += chunk
    os.close(here)
    assert process.wait() == 0
    text = seen.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert "/50" in text  # the steps
    assert "Done: completed all epochs" in text
