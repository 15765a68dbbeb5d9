"""Run directories and files of settings from strangers: no code is executed unless it is trusted explicitly."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import torchcaps
from tests.cli.commands import usage_error
from tests.training.helpers import small_spec
from torchcaps._core.serialize import find_class
from torchcaps.cli import main
from torchcaps.data.registry import find_spec, list_datasets
from torchcaps.models.registry import find_model, list_models
from torchcaps.routing import Uniform
from torchcaps.training import RunSpec, load_run, resume
from torchcaps.training.distributed import launch_workers
from torchcaps.training.settings_file import check_registered

# A module that leaves a file if it is imported, with a class of each kind.
HELPER = """
from pathlib import Path
Path("executed").touch()
from dataclasses import dataclass
from torchcaps.data.datasets.digits import Digits as Data
from torchcaps.models import schedules, Sabour2017 as Net
from torchcaps.routing import Dynamic

@dataclass(frozen=True)
class OneCycle(schedules.OneCycle):
    pass
"""
UNTRUSTED: dict[str, dict[str, Any]] = {
    "model": {"model": "folder.helper.Net"},
    "data": {"data": "folder.helper.Data"},
    "test data": {"test_data": "folder.helper.Data"},
    "schedule": {"lr_schedule": {"class_path": "folder.helper.OneCycle", "init_args": {}}},
    "routing": {"model_options": {"routing": {"class_path": "folder.helper.Dynamic", "init_args": {}}}},
    "attribute": {"lr_schedule": {"class_path": "torchcaps.models.schedules.math.floor", "init_args": {}}},
}


@pytest.fixture
def folder(registered_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory with ``folder``, a run that contains a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(registered_run, "folder")
    Path("folder/helper.py").write_text(HELPER)
    Image.new("L", (28, 28)).save("image.png")
    yield Path("folder")
    for name in [name for name in sys.modules if name.partition(".")[0] == "folder"]:
        del sys.modules[name]  # only these: packages that are imported twice would have two versions of their classes


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    options = {**values["model_options"], **changes.get("model_options", {})}
    path.write_text(yaml.safe_dump({**values, **changes, "model_options": options}))


@pytest.mark.parametrize("name", UNTRUSTED)
def test_no_command_imports_code_that_a_run_names(name: str, folder: Path) -> None:
    change_config(folder, UNTRUSTED[name])
    for command in (
        "predict folder image.png",
        "evaluate folder",
        "analyze folder dead",
        "train --resume folder",
        "train --config folder/config.yaml",
    ):
        message = usage_error(*command.split())
        module = "torchcaps.models.schedules.math" if name == "attribute" else "folder.helper"
        for part in ("folder/config.yaml", module, "--trust-remote-code"):
            assert part in message, (command, message)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"routing": "folder.helper.Dynamic"},
        {"routing": {"class-path": "folder.helper.Dynamic"}},
        {"routing.class_path": "folder.helper.Dynamic"},
        {"lr-schedule": "folder.helper.OneCycle"},
        {
            "lr_schedule": {
                "class_path": "torchcaps.models.schedules.Product",
                "init_args": {"first": "folder.helper.X"},
            }
        },
        {"lr_schedule": {"first": "folder.helper-2.X"}},
        {"routing": '{"class_path": "folder.helper.Dynamic"}'},
        {"routing": '{"class_path": "folder\\u002ehelper\\u002eDynamic"}'},
        {"lr_schedule": {"init_args": '{"first": "folder\\u002ehelper\\u002eOneCycle"}'}},
        {"lr_schedule.init_args.first": {"class_path": "folder.helper.OneCycle"}},
    ],
    ids=str,
)
def test_no_spelling_of_a_setting_imports_code(settings: dict[str, Any], folder: Path) -> None:
    Path("settings.yaml").write_text(yaml.safe_dump(settings))
    message = usage_error("train", "--config", "settings.yaml")
    assert "settings.yaml" in message
    assert "--trust-remote-code" in message
    assert not Path("executed").exists()


def test_registered_names_need_no_trust() -> None:
    spec = RunSpec.of("capsnet_small", routing="em")
    check_registered(spec.to_plain())
    check_registered({"augmentation": "sabour2017.mnist", "lr_schedule": "one_cycle", "lr_schedule.warmup": "0.5"})
    assert RunSpec.from_plain(spec.to_plain()) == spec
    assert find_class("torchcaps.routing.em.EM") is find_class("torchcaps.routing.EM")


def test_runs_with_own_code_are_told_apart() -> None:
    @dataclass(frozen=True)
    class OwnRouting(Uniform):
        """A routing that is not part of torchcaps."""

    assert not RunSpec.of("capsnet_small", routing="em").names_own_code
    assert not small_spec("capsnet_small", data="digits").names_own_code
    assert small_spec().names_own_code  # model and data by import path
    assert small_spec("capsnet_small").names_own_code
    assert small_spec("capsnet_small", data="digits", routing=OwnRouting()).names_own_code


def test_trust_is_given_by_flag_or_argument_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_config(folder, {**UNTRUSTED["schedule"], "trust_remote_code": True})
    assert "trust_remote_code" in usage_error("evaluate", "folder")
    message = usage_error("train", "--config", "folder/config.yaml")
    assert "--trust-remote-code" in message
    Path("settings.yaml").write_text("trust-remote-code: true\nepochs: 1")
    assert "trust-remote-code" in usage_error("train", "--config", "settings.yaml")
    assert "--trust-remote-code" in usage_error("evaluate", "folder", "--trust-remote-code=false")
    assert not Path("executed").exists()


def test_trusted_code_is_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, UNTRUSTED["test data"])
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_run(folder)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        resume(folder)
    assert not Path("executed").exists()
    main(["evaluate", "folder", "--trust-remote-code", "--json", "--num-threads", "1"])
    assert Path("executed").exists()
    assert sys.path[-1] == os.getcwd()
    assert json.loads(capsys.readouterr().out)["data"] == "folder.helper.Data"


def test_fit_does_not_import_code_of_a_run_that_it_resumes(folder: Path) -> None:
    images, labels = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    for name in ("model", "data", "test data", "attribute"):
        config = (folder / "config.yaml").read_text()
        change_config(folder, UNTRUSTED[name])
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            torchcaps.fit("capsnet_small", (images, labels), resume=folder, steps=3, quiet=True)
        (folder / "config.yaml").write_text(config)
    assert not Path("executed").exists()


@pytest.mark.parametrize("name", ["model", "data"])
def test_import_paths_in_use_are_not_trusted(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own import path is neither listed nor accepted from files afterwards."""
    monkeypatch.syspath_prepend(Path.cwd())
    look_up = {"model": find_model, "data": find_spec}[name]
    before = (list_models(), list_datasets())
    look_up(UNTRUSTED[name][name])
    assert (list_models(), list_datasets()) == before
    change_config(folder, UNTRUSTED[name])
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_run(folder)


def test_names_on_the_command_line_are_imported_from_the_end_of_the_path(folder: Path) -> None:
    assert "folder.helper.Nothing" in usage_error("train", "folder.helper.Nothing")
    assert Path("executed").exists()
    assert sys.path[-1] == os.getcwd()
    assert os.getcwd() not in sys.path[:-1]


def test_python_m_does_not_search_the_current_directory_first(folder: Path) -> None:
    torch.manual_seed(0)
    Image.fromarray((torch.rand(28, 28) * 255).byte().numpy()).save("image.png")
    for name in ("typing", "rich", "torch", "yaml", "safetensors", "tests"):
        Path(f"{name}.py").write_text("open('executed', 'w')")
    command = [sys.executable, "-m", "torchcaps", "predict", "folder", "image.png", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not Path("executed").exists()


def test_processes_that_a_command_starts_do_not_search_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the fork server of ``torchcaps bench memory``, which multiprocessing starts by ``python -c``."""
    monkeypatch.chdir(tmp_path)
    Path("keyword.py").write_text("open('executed', 'w')")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "argv", ["torchcaps", "--version"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # replaced by the command
    main()
    subprocess.run([sys.executable, "-c", "import keyword"], check=True)
    assert not Path("executed").exists()


def test_launched_workers_do_not_search_the_current_directory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def launch(config: Any, program: str) -> Any:
        return lambda *arguments: seen.update(os.environ)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    monkeypatch.setattr(sys, "path", ["/first", *sys.path])
    assert launch_workers(["train"], 2) == 0
    assert seen["PYTHONSAFEPATH"] == "1"
    assert seen["PYTHONPATH"].split(os.pathsep) == [os.path.abspath(entry) for entry in sys.path]
    assert "PYTHONSAFEPATH" not in os.environ
