"""The command line, as a person and as a script would use it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchcaps
from tests.commands import refusal, run
from torchcaps.cli import main
from torchcaps.models.registry import MODELS
from torchcaps.routing import Dynamic

ROOT = Path(__file__).resolve().parent.parent


def test_list_has_every_model_with_paper_data_parameters_and_routing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[0]: line for line in run(capsys, "list").splitlines() if line.strip()}
    assert set(torchcaps.list_models()) <= set(lines)
    line = lines["tsai2020_cifar10"]
    assert line.split() == [
        "tsai2020_cifar10",
        "Tsai",
        "2020",
        "cifar10",
        "561,297",
        "0.56M",
        "InvertedAttention(iterations=2)",
    ]
    assert "Chen 2019" in lines["chen2019_cnn_mnist"]


def test_list_by_pattern_and_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "list", "choi", "--json"))
    assert [row["name"] for row in rows] == ["choi2019_affnist", "choi2019_cifar10", "choi2019_mnist"]
    assert rows[2]["parameters"] == 5_312_528
    assert rows[2]["published"] == "5.31M"
    assert "no model has 'choy2019' in its name, paper or data" in refusal("list", "choy2019")
    assert len(json.loads(run(capsys, "list", "Sabour 2017", "--json"))) == 9
    assert run(capsys, "--version") == f"torchcaps {torchcaps.__version__}\n"


def test_show_prints_layers_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "sabour2017_mnist", "--batch", "16")
    for words in (
        "8,215,568 parameters (the paper prints 8.2M)",
        "conv 9x9",
        "6 x 6 x 32 x 8",
        "1,474,560",
        "203,202,560",
        "Memory to train on a CPU with batches of 16, MiB:",
        "votes stored",
        "votes streamed",
        "Trained by default with the margin loss, adam at 0.001, Exponential(decay=0.96, period=2000",
    ):
        assert words in text, words


def test_show_takes_the_models_own_fields(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "sabour2017_mnist", "--image", "3x24x24", "--classes", "21", "--batch", "16", "--json"]
    shown = json.loads(run(capsys, *words, "--routing", "em", "--routing.iterations", "3", "--reconstruction", "false"))
    layers = {layer["name"]: layer for layer in shown["layers"]}
    assert layers["digit"]["output"] == [21, 16]
    assert "EM(iterations=3)" in layers["digit"]["kind"]
    assert "decoder" not in layers
    assert shown["memory"]["stored"]["total"] > shown["memory"]["streamed"]["total"]
    assert shown["memory"]["stored"]["votes"] == 16 * 4 * layers["digit"]["votes"]
    deep = json.loads(run(capsys, "show", "choi2019_cifar10", "--depth=2", "--dim=16", "--batch=1", "--json"))
    assert deep["parameters"] == 3_678_944 - 256
    other = json.loads(
        run(capsys, "show", "tsai2020_cifar10", "--stages", "[[8, 1]]", "--image=1x20x20", "--batch=1", "--json")
    )
    assert other["layers"][0]["output"] == [256, 10, 10]


def test_a_routing_by_name_is_that_of_create_model(capsys: pytest.CaptureFixture[str]) -> None:
    """With its own defaults, whatever those of the model's routing; and flags may come first."""
    for flags in (["--routing", "em"], ["--routing=EM"]):
        shown = json.loads(run(capsys, "show", "--batch", "1", *flags, "--json", "sabour2017_svhn"))
        assert shown["fields"]["routing"]["kind"] == "EM"
        assert shown["fields"]["routing"]["iterations"] == torchcaps.create_routing("em").iterations
        assert shown["published"] == ""
    shown = json.loads(run(capsys, "show", "capsnet_small", "--routing.leak", "true", "--hidden", "32,16", "--json"))
    assert shown["fields"]["routing"] == {"kind": "Dynamic"} | dataclasses.asdict(Dynamic(3, leak=True))
    assert shown["fields"]["hidden"] == [32, 16]
    assert shown["recipe"]["batch_size"] == 64


def test_the_parts_of_the_memory_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "show", "capsnet_small", "--batch", "2").splitlines()
    numbers = [float(cell) for line in lines if line.startswith(" votes stored") for cell in line.split()[2:]]
    assert sum(numbers[:4]) == pytest.approx(numbers[4], abs=0.3)


def test_the_defaults_of_show_are_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("chen2019_multi_cifar10", "yang2021_mnist", "sabour2017_cnn_mnist"):
        shown = json.loads(run(capsys, "show", name, "--json", "--batch", "1"))
        assert shown["parameters"] == torchcaps.create_model(name).n_parameters


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shw"], "did you mean 'show'"),
        (["show"], "required: name"),
        (["show", "sabour2017_mnst"], "did you mean 'sabour2017_mnist'"),
        (["show", "sabour2017_mnist", "--depth", "2"], "there is no flag --depth: this model has --batch, --classes"),
        (["show", "sabour2017_mnist", "--image", "28x28"], "--image must be CHANNELSxHEIGHTxWIDTH, such as 3x64x64"),
        (["show", "sabour2017_mnist", "--image", "1x9x9"], "image must be 17x17 or larger"),
        (["show", "sabour2017_mnist", "--classes", "many"], "classes"),
        (["show", "sabour2017_mnist", "--routing", "dynamc"], "did you mean 'dynamic'"),
        (["show", "sabour2017_mnist", "--routing", "EM", "--routing.leak", "true"], "leak"),
        (["show", "sabour2017_mnist", "--batch", "0"], "--batch must be 1 or more, got 0"),
        (["show", "sabour2017_mnist", "--preset", "mine"], "preset"),
        (["list", "--bogus"], "--bogus"),
        (["show", "yang2021_mnist", "--penalty", "l3"], "--penalty: 'l3' is none of l1, l2"),
        (["show", "sabour2017_mnist", "--routing", "EM2"], "did you mean 'em'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(words: list[str], message: str) -> None:
    assert message in refusal(*words)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torchcaps train sabour2017_mnist" in run(capsys)
    assert run(capsys) == run(capsys, "--help")
    for command in ("list", "show", "train", "evaluate", "predict"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert re.search("Examples?: torchcaps", " ".join(capsys.readouterr().out.split()))


def test_without_the_extra_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['jsonargparse'] = None; import torchcaps; import torchcaps.cli"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.strip() == "torchcaps: the command line needs jsonargparse: pip install 'torchcaps[cli]'"


def test_the_installed_command_runs_and_leaves_a_closed_pipe_in_peace() -> None:
    command = Path(sys.executable).parent / "torchcaps"
    result = subprocess.run(f"{command} list | head -n 1", shell=True, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0
    assert result.stderr == ""
    assert len(MODELS) == len(torchcaps.list_models())
