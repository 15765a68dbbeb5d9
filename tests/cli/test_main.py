"""``torchcaps list``, ``torchcaps show``, the help, and the installed command."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import torchcaps
from tests.cli.commands import failure, run_command, usage_error
from torchcaps._core.serialize import to_plain
from torchcaps.cli import main
from torchcaps.cli.console import ExitCode
from torchcaps.cli.main import COMMANDS
from torchcaps.data import storage
from torchcaps.routing import EM, Dynamic

ROOT = Path(__file__).resolve().parents[2]


def test_list_has_every_model_with_paper_data_parameters_and_routing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[0]: line for line in run_command(capsys, "list").splitlines() if line.strip()}
    assert set(torchcaps.list_models()) <= set(lines)
    expected = "tsai2020_cifar10 Tsai 2020 cifar10 561,297 0.56M InvertedAttention(iterations=2)"
    assert lines["tsai2020_cifar10"].split() == expected.split()
    assert "Chen 2019" in lines["chen2019_cnn_mnist"]


def test_list_by_pattern_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(run_command(capsys, "list", "choi", "--json"))}
    assert set(rows) == set(torchcaps.list_models("choi2019_*"))
    assert rows["choi2019_mnist"]["parameters"] == 5_312_528
    assert rows["choi2019_mnist"]["published"] == "5.31M"
    assert "'choy2019'" in usage_error("list", "choy2019")
    rows = json.loads(run_command(capsys, "list", "Sabour 2017", "--json"))
    assert {row["name"] for row in rows} == set(torchcaps.list_models("sabour2017_*"))
    assert run_command(capsys, "--version") == f"torchcaps {torchcaps.__version__}\n"


def test_show_prints_layers_memory_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys, "show", "sabour2017_mnist", "--batch-size", "16")
    for part in (
        "8,215,568 parameters",
        "8.2M",
        "conv 9x9",
        "6 x 6 x 32 x 8",
        "1,474,560",
        "203,202,560",
        "batches of 16, MiB",
        "votes stored",
        "votes streamed",
        "margin loss, adam with lr 0.001, Exponential(decay=0.96, period=2000",
    ):
        assert part in text, part


def test_show_accepts_the_fields_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--image 3x24x24 --classes 21 --batch-size 16 --json --routing em --routing.iterations 3"
    shown = json.loads(run_command(capsys, "show", "sabour2017_mnist", *flags.split(), "--reconstruction", "false"))
    layers = {layer["name"]: layer for layer in shown["layers"]}
    assert layers["digit"]["output"] == [21, 16]
    assert "EM(iterations=3)" in layers["digit"]["kind"]
    assert "decoder" not in layers
    assert shown["memory"]["stored"]["total"] > shown["memory"]["streamed"]["total"]
    assert shown["memory"]["stored"]["votes"] == 16 * 4 * layers["digit"]["votes"]
    deep = ["--depth=2", "--dim=16", "--batch-size=1", "--json"]
    assert json.loads(run_command(capsys, "show", "choi2019_cifar10", *deep))["parameters"] == 3_678_944 - 256
    wide = ["--stages", "[[8, 1]]", "--image=1x20x20", "--batch-size=1", "--json"]
    other = json.loads(run_command(capsys, "show", "tsai2020_cifar10", *wide))
    assert other["layers"][0]["output"] == [256, 10, 10]


@pytest.mark.parametrize("command", ["list tsai2020", "show capsnet_small --batch-size 2"])
def test_narrow_terminal_shows_whole_names_and_numbers(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = run_command(capsys, *command.split())
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run_command(capsys, *command.split())
    assert [line for line in narrow.splitlines() if len(line) > 40] == []
    words = {word for word in wide.split() if "_" in word or "," in word}
    assert words - set(narrow.split()) == set()


def test_a_routing_by_name_has_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of the model's routing; and flags may come before the model."""
    for flags in (["--routing", "em"], ["--routing=EM"]):
        shown = json.loads(run_command(capsys, "show", "--batch-size", "1", *flags, "--json", "sabour2017_svhn"))
        assert shown["fields"]["routing"] == to_plain(EM())
        assert shown["published"] == ""
    flags = ["--routing.leak", "true", "--hidden", "32,16", "--json"]
    shown = json.loads(run_command(capsys, "show", "capsnet_small", *flags))
    assert shown["fields"]["routing"] == to_plain(Dynamic(3, leak=True))
    assert shown["fields"]["hidden"] == [32, 16]
    assert shown["recipe"]["batch_size"] == 64


def test_the_parts_of_the_memory_sum_to_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_command(capsys, "show", "capsnet_small", "--batch-size", "2").splitlines()
    (row,) = (line.split()[2:] for line in lines if line.startswith(" votes stored"))
    *parts, total = map(float, row)
    assert sum(parts) == pytest.approx(total, abs=0.3)


@pytest.mark.parametrize("name", ["chen2019_multi_cifar10", "yang2021_mnist", "sabour2017_cnn_mnist"])
def test_the_defaults_of_show_are_those_of_the_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run_command(capsys, "show", name, "--json", "--batch-size", "1"))
    model = torchcaps.create_model(name)
    assert shown["parameters"] == model.n_parameters
    assert shown["fields"] == to_plain(model.spec)
    assert shown["recipe"] == to_plain(model.recipe)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("shw", ["'shw'", "'show'"]),
        ("show", ["name"]),
        ("show sabour2017_mnst", ["'sabour2017_mnst'", "'sabour2017_mnist'"]),
        ("show sabour2017_mnist --kq 2", ["--kq", "--batch-size", "--classes"]),
        ("show sabour2017_mnist --image 28x28", ["--image", "3x64x64", "'28x28'"]),
        ("show sabour2017_mnist --image 1x9x9", ["17x17", "9x9"]),
        ("show sabour2017_mnist --classes many", ["--classes", "int", "'many'"]),
        ("show sabour2017_mnist --routing dynamc", ["'dynamc'", "'dynamic'"]),
        ("show sabour2017_mnist --routing EM --routing.leak true", ["--routing.leak", "--routing.iterations"]),
        ("show sabour2017_mnist --batch-size 0", ["--batch-size", "at least 1", "0"]),
        ("show sabour2017_mnist --preset mine", ["--preset", "paper", "official", "'mine'"]),
        ("list --bogus", ["--bogus", "--json"]),
        ("show yang2021_mnist --penalty l3", ["--penalty", "l1, l2", "'l3'"]),
        ("show sabour2017_mnist --routing EM2", ["'EM2'", "'em'"]),
    ],
)
def test_errors_name_flag_and_value(arguments: str, parts: list[str]) -> None:
    message = usage_error(*arguments.split())
    assert [part for part in parts if part not in message] == [], message


def test_help_lists_commands_exit_codes_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys)
    assert text == run_command(capsys, "--help")
    for name in COMMANDS:
        assert f"\n  {name} " in text, name
    for code in (ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.SIGNAL, ExitCode.INTERRUPTED):
        assert f"{code:d} " in text, code
    assert "torchcaps train sabour2017_mnist" in text
    for command in ("list", "show", "train", "evaluate", "predict"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f": torchcaps {command}" in " ".join(capsys.readouterr().out.split())


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchcaps.cli.show.list_command", interrupt)
    with pytest.raises(SystemExit) as stop:
        main(["list"])
    assert stop.value.code == ExitCode.INTERRUPTED == 128 + 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| (\d[^|]*) \|", (ROOT / "docs/scaling.md").read_text(), re.MULTILINE)
    documented = {int(code) for row in rows for code in re.findall(r"\d+", row)}
    codes = {int(code) for code in ExitCode if code != ExitCode.SIGNAL}
    codes |= {ExitCode.SIGNAL + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)}
    assert codes - documented == set()


def test_missing_cli_extra() -> None:
    script = "import sys; sys.modules['jsonargparse'] = None; import torchcaps; import torchcaps.cli"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == ExitCode.USAGE
    assert "jsonargparse" in result.stderr
    assert "pip install 'torchcaps[train]'" in result.stderr


def test_the_installed_command_accepts_a_closed_pipe() -> None:
    command = Path(sys.executable).parent / "torchcaps"
    result = subprocess.run(f"{command} list | head -n 1", shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def test_list_accepts_wildcards(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run_command(capsys, "list", "tsai2020_res*", "--json"))
    assert [row["name"] for row in rows] == torchcaps.list_models("tsai2020_res*")


def test_flags_before_the_command_are_reported_as_flags() -> None:
    assert "torchcaps list --json" in usage_error("--json", "list")


def test_only_almost_equally_similar_names_are_suggested() -> None:
    assert usage_error("trian").endswith("did you mean 'train'?")


def test_help_respects_narrow_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_command(capsys, "--help")
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    texts = [capsys.readouterr().out, run_command(capsys, "--help")]
    for text in texts:
        assert max(map(len, text.partition("examples:")[0].splitlines())) <= 60
    assert texts[1].split() == whole.split()


@pytest.mark.parametrize("command", ["data get mnist", "train sabour2017_mnist"])
def test_a_failed_download_is_a_failure_not_a_usage_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> None:
        raise storage.DownloadError("no network")

    monkeypatch.setattr(storage, "download_file", download)
    assert "could not be downloaded" in failure(*command.split(), "--data-dir", str(tmp_path))


def test_an_error_of_the_file_system_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "runs/x")

    monkeypatch.setattr("torchcaps.cli.evaluate.evaluate_command", fail)
    with pytest.raises(SystemExit) as exited:
        main(["evaluate", "run"])
    assert exited.value.code == 1
    assert capsys.readouterr().err == "torchcaps: runs/x: Permission denied\n"
