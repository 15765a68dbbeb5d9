"""``torchcaps train``: flags, configuration files, errors, resume, and the files of a run."""

import contextlib
import dataclasses
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.commands import run_command, usage_error
from tests.training.tiny import DATA, MODEL
from torchcaps._core.serialize import is_resumable
from torchcaps.cli import main
from torchcaps.cli import train_parser as command
from torchcaps.cli.command_line import CommandLine
from torchcaps.cli.parser import field_help
from torchcaps.cli.train_parser import COMMON_FLAGS, make_train_parser, train_help
from torchcaps.data import Loader
from torchcaps.models.registry import find_model
from torchcaps.models.schedules import Cosine, OneCycle
from torchcaps.training import RunSpec, StopReason, load_run, train
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.logging import STOP_DESCRIPTIONS, read_metrics
from torchcaps.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--data", DATA, "--batch-size", "16", "--num-threads", "1"]

pytestmark = pytest.mark.usefixtures("here")


def spec_of(directory: str) -> RunSpec:
    return load_run(directory).spec


def test_files_and_output_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys, "train", MODEL, *TINY, "--epochs", "2", "--val-fraction", "0.2")
    for value in (
        "1x28x28",
        "10 classes",
        "56 training",
        "14 validation",
        "30 test",
        "memory",
        "runs/Narrow-FewDigits-1",
    ):
        assert value in text, value
    assert not {"\x1b", "\r"} & set(text)  # no control sequences outside a terminal
    directory = Path("runs/Narrow-FewDigits-1")
    for name in (
        "config.yaml",
        "metrics.csv",
        "results.json",
        "checkpoints/last.safetensors",
        "checkpoints/best.safetensors",
    ):
        assert (directory / name).is_file(), name
    report = json.loads((directory / "results.json").read_text())
    assert report["test"]["last"]["n"] == 30
    assert report["seed"] == 0
    assert report["machine"]["torch"] == torch.__version__
    run_command(capsys, "train", MODEL, *TINY, "--steps", "1")
    assert Path("runs/Narrow-FewDigits-2").is_dir()


def test_settings_that_are_not_given_are_those_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--widths", "4,4,4,8", "--types", "2", "--primary-dim", "4", "--hidden", "8"]
    run_command(capsys, "train", *TINY, *sizes, "--steps", "1", "--out", "run")
    spec = spec_of("run")
    assert spec.model == "capsnet_digits"
    assert spec.recipe.lr_schedule == OneCycle(warmup=0.2)
    assert spec.recipe.augmentation == "mazzia2021.mnist"
    assert spec.recipe.optimizer.lr == 4e-3


def test_routing_model_and_data_by_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from tests.training.tiny import FewDigits, Narrow\n"
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
    arguments = ["mine.net", "--data", "mine.Data", "--routing", "mine.MyRouting", "--steps", "1", "--out", "run"]
    assert "33 training" in run_command(capsys, "train", *arguments, "--routing.sharpness", "2")
    model = load_run("run", trust_remote_code=True).model
    assert type(model.spec.routing).__name__ == "MyRouting"
    assert model.spec.routing.sharpness == 2
    assert model.spec.width == 3
    for arguments, parts in {
        ("mine.nothing",): ("mine.nothing", "'nothing'"),
        ("--data", "absent.Data"): ("absent.Data", "'absent'"),
        ("mine.Data",): ("mine.Data", "ModelSpec"),
    }.items():
        message = usage_error("train", *arguments)
        assert [part for part in parts if part not in message] == [], message


# Arguments, and what the error must name: the flag or argument, the value, and what is accepted.
MISTAKES: dict[str, tuple[str, ...]] = {
    "capsnet_smal": ("'capsnet_smal'", "'capsnet_small'"),
    "photo": ("'photo'", "not an existing directory"),
    "mnist": ("unknown model 'mnist'", "--data mnist"),
    "--optimizer AdamW": ("--optimizer", "did you mean adamw?", "'AdamW'"),
    "--device gpu": ("--device", "did you mean cuda?", "'gpu'"),
    "--routing dynamic --routing.iterations 0": ("--routing.iterations must be", "0"),
    "--data digts": ("'digts'", "'digits'"),
    "--epohcs 3": ("--epohcs", "--epochs"),
    "--epochs 3 --steps 4": ("--epochs", "--steps", "3", "4"),
    "--epochs": ("--epochs",),
    "--epochs many": ("--epochs", "int", "'many'"),
    "--epochs 0": ("--epochs", "at least 1", "0"),
    "--max-minutes 0": ("--max-minutes", "greater than 0"),
    "--max-grad-norm -1": ("--max-grad-norm", "-1"),
    "--val-fraction 1.5": ("--val-fraction", "below 1", "1.5"),
    "--val-fraction 0.00001": ("--val-fraction 1e-05", "0 of 70"),
    "--eval-weights best": ("--eval-weights best", "--val-fraction"),
    "--early-stopping-patience 3": ("--early-stopping-patience", "--val-fraction"),
    "--target-accuracy 0.9": ("--target-accuracy", "--val-fraction"),
    "--target-accuracy 1.5": ("--target-accuracy", "at most 1", "1.5"),
    "--max-train-images 0": ("--max-train-images", "at least 1"),
    "--image 3x28x28": ("--image 3x28x28", "few", "1x28x28"),
    "--image 28x28": ("--image", "3x64x64", "'28x28'"),
    "--classes 5": ("--classes 5", "few", "10"),
    "--data multimnist --data.source digits --n-objects 1": ("--n-objects 1", "multimnist", "2"),
    "--data diverse-multimnist --data.source digits": (MODEL, "one object", "diverse-multimnist"),
    "--augmentation tsai2020.cifar10": ("'tsai2020.cifar10'", "--augmentation"),
    "--augmentation nothing": ("'nothing'", "augmentation"),
    "--routing dynamc": ("'dynamc'", "'dynamic'"),
    "--lr-schedule cosin": ("'cosin'", "'cosine'"),
    "--precision half": ("--precision", "bf16-mixed", "'half'"),
    "--deterministic=maybe": ("--deterministic", "true or false", "'maybe'"),
    "--data.train 0": ("'train'", "few"),
    "--data.trains 3": ("--data.trains", "--data.train"),
    "--resume nowhere": ("'nowhere'",),
    "--resume=": ("''",),
    "--loss foo": ("--loss", "margin, spread, cross_entropy, binary", "'foo'"),
    "--optimizer adm": ("--optimizer", "adam", "'adm'"),
    "--routing em --routing.iteration 3": ("--routing.iteration", "--routing.iterations"),
    "--routing em --routing.iterations three": ("--routing.iterations must be int", "'three'"),
    "--routing.iterations three": ("--routing.iterations must be int", "'three'"),
    "--learning-rate 0.1": ("--learning-rate", "did you mean --lr?"),
    "--gpu": ("--gpu", "did you mean --device cuda?"),
    "--batch 3": ("--batch", "did you mean --batch-size?"),
    "--bogus": ("unknown flag --bogus; ",),
    "--data.broken skip": ("--data.broken", "did you mean --on-error?"),
    "-b 3": ("unknown flag -b", "--batch-size"),
    "--epochs --lr 3": ("--epochs needs a value, int",),
    "--model capsnet_small": ("capsnet_small", MODEL),
    "--image-size 32": ("--image-size", "director"),
    "--on-error fail": ("--on-error", "director"),
    "--lr-schedule cosine --lr-schedule.warmup 2": ("--lr-schedule.warmup must be", "at most 1", "2"),
    "--routing em --routing.leak true": ("--routing.leak", "--routing.iterations"),
    "--routing own.Dynamo": ("own.Dynamo", "'own'"),
    "--lr-schedule OneCycle --lr-schedule.wormup 1": ("--lr-schedule.wormup", "--lr-schedule.warmup"),
    "--config a.yaml --config=b.yaml": ("--config",),
    "--config": ("--config",),
    "--resume a --resume b": ("--resume",),
    "--device cuda": ("--device", "cuda"),
    "--seed 99999999999999999999": ("--seed", "99999999999999999999"),
    "--loss.margin-steps 0": ("--loss.margin-steps", "at least 1", "0"),
    "--momentum -1": ("--momentum", "at least 0", "-1"),
    "--ascents 1": ("--ascents", "quadratic"),
    "--deterministic capsnet_small": ("capsnet_small", MODEL),
    "--out /dev/null/run": ("/dev/null/run",),
    "--config nothing.yaml": ("nothing.yaml", "No such file"),
    "./nowhere": ("./nowhere",),
    f"{MODEL} capsnet_small": ("capsnet_small", MODEL),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_errors_name_flag_and_value_and_leave_no_directory(text: str, tmp_path: Path) -> None:
    arguments = text.split()
    data = [] if {"--data", "--resume", "--resume=", "--config"} & set(arguments) else ["--data", DATA]
    has_model = not arguments[0].startswith("-") or "--resume" in text
    message = usage_error("train", *([] if has_model else [MODEL]), *data, *arguments)
    assert [part for part in MISTAKES[text] if part not in message] == [], message
    assert not (tmp_path / "runs").exists()


def test_resume_accepts_exactly_the_resumable_settings(capsys: pytest.CaptureFixture[str]) -> None:
    resumable = {f.name for f in dataclasses.fields(RunSpec) if is_resumable(RunSpec, f.name)}
    assert set(command.RESUME_FIELDS) == resumable - {"test_options"} | {"epochs", "steps"}
    run_command(capsys, "train", MODEL, *TINY, "--epochs", "1", "--out", "run")
    for flag, value in {"--seed": "3", "--lr": "0.1", "--width": "5", "--batch-size": "2"}.items():
        assert flag in usage_error("train", "--resume", "run", flag, value)
    assert MODEL in usage_error("train", "--resume", "run", MODEL)
    text = run_command(capsys, "train", "--resume", "run", "--epochs", "2", "--eval-interval-epochs", "3")
    assert "at step 5, epoch 1.00" in text
    assert len(read_metrics(Path("run/metrics.csv"))) == 2
    message = usage_error("train", "--resume", "run", "--steps", "3")
    assert "10 steps" in message
    assert spec_of("run").recipe.epochs == 2
    assert spec_of("run").eval_interval_epochs == 3
    assert "--resume run" in usage_error("train", MODEL, *TINY, "--out", "run")


def test_trap_52_the_best_checkpoint_is_chosen_on_the_validation_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations during training use the validation set, never the test set; both are reported."""
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
    assert [row["test_accuracy"] for row in rows] == [None] * 4
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


def test_directory_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    for index, name in enumerate(("bright", "dark", "mixed")):
        for n in range(8):
            pixels = (torch.rand(40, 36, 3, generator=generator) * 80 + 80 * index).to(torch.uint8)
            Path("pics", name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(f"pics/{name}/{n}.png")
    tiny = ["--channels", "4,4", "--types", "2"]
    text = run_command(capsys, "train", "./pics", *tiny, "--steps", "2", "--num-threads", "1")
    for value in ("capsnet_images", "3x40x36", "3 classes", "18 training", "3 validation", "3 test"):
        assert value in text, value
    directory = "runs/capsnet_images-pics-1"
    assert Path(directory, "checkpoints/best.safetensors").is_file()
    text = run_command(capsys, "evaluate", directory, "--num-threads", "1")
    assert "pics, test: 3 images" in text
    assert "bright" in text
    text = run_command(capsys, "predict", directory, "pics/dark/0.png", "--json")
    assert set(json.loads(text)[0]["scores"]) == {"bright", "dark", "mixed"}
    message = usage_error("train", "./pics", "--data", "digits")
    assert "./pics" in message
    assert "--data digits" in message


def test_data_dir_is_stored_as_absolute_path(capsys: pytest.CaptureFixture[str]) -> None:
    Path("files").mkdir()
    run_command(capsys, "train", MODEL, *TINY, "--steps", "1", "--data-dir", "files", "--out", "run")
    assert spec_of("run").data_dir == str(Path("files").resolve())


def test_boolean_flags_do_not_consume_the_next_argument(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--reconstruction", MODEL, "--deterministic", *TINY, "--steps", "1", "--out", "run"]
    run_command(capsys, "train", *flags)
    torch.use_deterministic_algorithms(False)
    assert spec_of("run").model == MODEL
    assert spec_of("run").model_options["reconstruction"] is True
    assert spec_of("run").deterministic is True
    flags = ["--config", "run/config.yaml", "--deterministic", "false", MODEL, "--out", "other"]
    run_command(capsys, "train", *flags)
    assert spec_of("other").deterministic is False
    assert spec_of("other").model == MODEL


def test_unavailable_device_is_reported_before_data_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torchcaps.training.run.open_data", lambda spec: pytest.fail("the data was opened"))
    assert "--device cuda" in usage_error("train", MODEL, *TINY, "--device", "cuda")


def test_model_flag_optimizer_and_quiet_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", MODEL, "--steps", "1", "--optimizer", "adamw", "--lr-schedule", "cosine", "--out", "run"]
    printed = run_command(capsys, "train", *TINY, *flags, "--quiet", "--json")
    results = json.loads(printed)
    assert (results["path"], results["steps"], results["compared"]) == ("run", 1, None)
    assert results["test"]["last"]["n"] == 30
    spec = spec_of("run")
    assert spec.recipe.lr_schedule == Cosine()
    assert (spec.recipe.optimizer.name, spec.recipe.optimizer.weight_decay) == ("adamw", 0.01)
    main(["train", MODEL, *TINY, "--steps", "1", "--json"])
    streams = capsys.readouterr()
    assert json.loads(streams.out)["model"] == MODEL
    assert "70 training images" in streams.err
    text = run_command(capsys, "train", MODEL, *TINY, "--steps", "1", "-q")
    assert "training images" not in text
    assert "Finished" in text


def test_evaluation_on_other_classes(capsys: pytest.CaptureFixture[str]) -> None:
    for name, classes in (("first", "ab"), ("second", "bc")):
        for index, label in enumerate(classes):
            for n in range(4):
                Path(name, label).mkdir(parents=True, exist_ok=True)
                Image.new("L", (28, 28), 40 * n + 5 * index).save(f"{name}/{label}/{n}.png")
    run_command(capsys, "train", MODEL, "--data", "first", "--steps", "1", "--num-threads", "1", "--out", "run")
    message = usage_error("evaluate", "run", "--data", "second")
    assert [part for part in ("second", "'a' and 'b'", "got 'c'") if part not in message] == [], message


def test_tensorboard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(capsys, "train", MODEL, *TINY, "--epochs", "1", "--tensorboard", "--out", "run")
    (events,) = Path("run/tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = usage_error("train", MODEL, *TINY, "--epochs", "1", "--tensorboard", "--out", "other")
    assert "pip install 'torchcaps[tensorboard]'" in message


def test_missing_train_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    assert "pip install 'torchcaps[train]'" in usage_error("train", MODEL, *TINY, "--epochs", "1")


def test_help_does_not_import_torch() -> None:
    """The help of a model imports torch, but not the training engine."""
    script = (
        "import sys, contextlib, json; from torchcaps.cli import main\n"
        "loaded = []\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit): main(arguments)\n"
        "    loaded.append([name for name in ('torch', 'lightning_fabric', 'matplotlib') if name in sys.modules])\n"
        "print(json.dumps(loaded))"
    )
    commands = [["--help"], ["train", "--help"], ["train", "capsnet_small", "--help"]]
    command = [sys.executable, "-c", script, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1]) == [[], [], ["torch"]], done.stderr


def test_stored_help_is_that_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    """`tools/help.py` writes the stored text."""
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    assert capsys.readouterr().out.split() == train_help().split()


def test_help_has_every_setting() -> None:
    parser, _ = make_train_parser(find_model("capsnet_small"), CommandLine([], []))
    text = parser.format_help().replace("\n", " ")
    names = {f.name for f in dataclasses.fields(RunSpec)} - {"model", "model_options", "recipe", *command.OPTIONS}
    for name in names:
        assert f" {command.flag_of(name)} " in text, name
        assert field_help(RunSpec, name), f"{name} has no description"


def test_help_shows_the_common_flags_and_one_example_per_line() -> None:
    text = train_help()
    assert [flag for flag in COMMON_FLAGS if f"  {flag} " not in text] == []
    assert len(COMMON_FLAGS) == 12
    assert "--micro-batches" not in text
    examples = text.partition("examples:\n")[2].splitlines()
    assert len(examples) > 3
    assert all(example.startswith("  torchcaps train") and example.count("torchcaps ") == 1 for example in examples)


def read_terminal(descriptor: int, chunks: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    chunks: list[bytes] = []
    reader = threading.Thread(target=read_terminal, args=(here, chunks))
    reader.start()
    with open(there, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", "100")
        patch.setenv("TERM", "xterm")
        main(["train", MODEL, *TINY, "--epochs", "2", "--out", "run", "--augmentation", ""])
    reader.join()
    os.close(here)
    text = b"".join(chunks).decode()
    for part in ("\x1b[", "━", "/10", STOP_DESCRIPTIONS[StopReason.MAX_EPOCHS]):
        assert part in text, part
