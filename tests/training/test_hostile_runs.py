"""Run directories from strangers: links, FIFOs, resources and directories that their settings name."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import EpsImagePlugin, Image

from tests.cli.commands import failure, usage_error
from torchcaps.cli import main
from torchcaps.data import DownloadError, MissingDataError, storage
from torchcaps.explorer import ExploredRun, export_page
from torchcaps.training import CheckpointError, RunError, RunSpec, load_run, resume, settings_file, setup
from torchcaps.training import run as training_run
from torchcaps.training.settings_file import limit_resources, may_download


@pytest.fixture
def hostile(registered_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, next to a file of the user's, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("precious").write_text("content")
    Path("private").mkdir()
    torch.manual_seed(0)
    Image.fromarray((torch.rand(28, 28) * 255).byte().numpy()).save("image.png")
    return Path(shutil.copytree(registered_run, "run"))


def change_config(run: Path, **changes: Any) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**values, **changes}))


@pytest.mark.parametrize("name", ["lock", "metrics.csv", "results.json", "figures", "checkpoints/best.safetensors"])
def test_resume_writes_through_no_link_out_of_the_run(name: str, hostile: Path) -> None:
    target = Path("private" if name == "figures" else "precious").absolute()
    shutil.rmtree(hostile / name, ignore_errors=True)
    (hostile / name).unlink(missing_ok=True)
    (hostile / name).symlink_to(target)
    with pytest.raises(RunError, match="symbolic link"):
        resume(hostile, lambda spec: spec.replace_recipe(steps=3), figures=False)
    assert Path("precious").read_text() == "content"
    assert list(Path("private").iterdir()) == []


def test_links_inside_the_run_and_a_link_to_it_are_accepted(hostile: Path) -> None:
    (hostile / "checkpoints").rename(hostile / "weights")
    (hostile / "checkpoints").symlink_to("weights")
    Path("link").symlink_to(hostile)
    assert resume("link", lambda spec: spec.replace_recipe(steps=3), figures=False).steps == 3


def test_predict_writes_through_no_link_out_of_the_run(hostile: Path) -> None:
    (hostile / "predictions").symlink_to(Path().absolute())  # image.png would be replaced by its figure
    before = Path("image.png").read_bytes()
    assert "--out" in usage_error("predict", "run", "image.png")
    assert Path("image.png").read_bytes() == before


@pytest.mark.parametrize("name", ["figures", "figures/dead.png"])
def test_analyze_writes_through_no_link_out_of_the_run(hostile: Path, name: str) -> None:
    shutil.rmtree(hostile / "figures", ignore_errors=True)
    (hostile / name).parent.mkdir(exist_ok=True)
    (hostile / name).symlink_to(Path("private" if name == "figures" else "precious").absolute())
    assert "--out" in usage_error("analyze", "run", "dead")
    assert Path("precious").read_text() == "content"
    assert list(Path("private").iterdir()) == []


def test_a_loop_of_links_is_one_sentence(hostile: Path) -> None:
    (hostile / "results.json").unlink()
    (hostile / "results.json").symlink_to("results.json")
    assert resume(hostile, lambda spec: spec.replace_recipe(steps=3), figures=False).steps == 3
    (hostile / "config.yaml").unlink()
    (hostile / "config.yaml").symlink_to("config.yaml")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        load_run(hostile)


def test_a_file_that_exceeds_the_memory_is_one_sentence(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_file(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory")

    monkeypatch.setattr("safetensors.safe_open", open_file)
    with pytest.raises(CheckpointError, match="Cannot allocate memory"):
        load_run(hostile)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/last.safetensors", "metrics.csv", "lock"])
def test_fifos_are_rejected(name: str, hostile: Path) -> None:
    """Opening a FIFO waits until another process writes to it."""
    (hostile / "checkpoints/previous.safetensors").unlink(missing_ok=True)
    (hostile / name).unlink(missing_ok=True)
    os.mkfifo(hostile / name)
    with pytest.raises((ValueError, CheckpointError, RunError), match="not a regular file"):
        resume(hostile, lambda spec: spec.replace_recipe(steps=3), figures=False)
    if name in ("config.yaml", "checkpoints/last.safetensors"):
        with pytest.raises((ValueError, CheckpointError), match="not a regular file"):
            load_run(hostile)


def test_resources_that_a_file_names_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_file, "available_cores", lambda: 12)
    spec = RunSpec.of("capsnet_small", devices=10**6, num_threads=10**9, num_workers=13)
    limited, notes = limit_resources(spec)
    assert (limited.devices, limited.num_threads, limited.num_workers) == (12, 12, 12)
    assert len(notes) == 3
    assert "--num-threads" in notes[1]
    limited, notes = limit_resources(spec, ["devices"])
    assert (limited.devices, limited.num_threads, len(notes)) == (12, 10**9, 1)
    monkeypatch.setattr(settings_file, "available_cores", lambda: 1)
    assert limit_resources(RunSpec.of("capsnet_small", devices=8)) == (RunSpec.of("capsnet_small", devices=8), [])


def test_resume_and_config_limit_resources(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[int] = []
    specs: list[RunSpec] = []
    monkeypatch.setattr("torchcaps.cli.runs.launch_workers", lambda arguments, devices: launched.append(devices))
    monkeypatch.setattr(settings_file, "available_cores", lambda: 2)
    monkeypatch.setattr(training_run, "open_data", lambda spec, download: specs.append(spec) or 1 / 0)
    change_config(hostile, devices=500, num_threads=10**9, num_workers=10**6)
    for command in ("--resume run", "--config run/config.yaml", "--resume run --devices 9"):
        with pytest.raises(SystemExit):
            main(["train", *command.split()])
    assert launched == [8, 8, 9]
    with pytest.raises(ZeroDivisionError):
        resume(hostile)
    with warnings.catch_warnings(action="always"), pytest.raises(ZeroDivisionError):
        main(["train", "--config", "run/config.yaml", "--devices", "1", "--num-workers", "9"])
    assert "num_threads 1,000,000,000 is limited to 8" in capsys.readouterr().err
    assert [(spec.num_threads, spec.num_workers) for spec in specs] == [(8, 8), (8, 9)]


def test_data_is_not_downloaded_to_a_directory_that_a_file_names(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[Path] = []

    def download(name: str, urls: Any, checksum: str, directory: Path, size: int = 0) -> Path:
        downloads.append(directory)
        raise DownloadError("no network")

    monkeypatch.setattr(storage, "download_file", download)
    monkeypatch.setenv("TORCHCAPS_DATA", str(Path("own").absolute()))
    change_config(hostile, data="mnist", data_dir=str(Path("private").absolute()))
    (hostile / "checkpoints/last.safetensors").unlink()
    (hostile / "checkpoints/previous.safetensors").unlink(missing_ok=True)
    for command in ("--resume run", "--config run/config.yaml"):
        assert "--data-dir" in usage_error("train", *command.split())
    assert downloads == []
    for command in ("--resume run", "--config run/config.yaml"):  # the user's own flag, the same directory
        failure("train", *command.split(), "--data-dir", "private")
    assert set(downloads) == {Path("private/mnist").absolute()}
    downloads.clear()
    change_config(hostile, data="mnist", data_dir=None)
    failure("train", "--resume", "run")
    assert set(downloads) == {Path("own/mnist").absolute()}


def test_evaluation_downloads_to_the_own_data_directory_only(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []

    def create(name: str, split: str, root: object, *, download: bool, **options: Any) -> Any:
        allowed.append(download)
        raise MissingDataError("missing")

    monkeypatch.setattr(setup, "create_dataset", create)
    change_config(hostile, data_dir="private")
    for flags in ("", "--data-dir private"):
        assert "missing" in usage_error("evaluate", "run", *flags.split())
    assert allowed == [False, True]
    assert "missing" in usage_error("audit", "run")
    assert allowed.pop() is False
    monkeypatch.setenv("TORCHCAPS_DATA", "private")
    assert may_download("private")
    assert may_download(None)
    assert not may_download("elsewhere")


def test_a_file_of_settings_does_not_choose_the_run_directory(hostile: Path) -> None:
    change_config(hostile, out=str(Path("private/new").absolute()))
    assert "out is a flag of the command line" in usage_error("train", "--config", "run/config.yaml")
    assert list(Path("private").iterdir()) == []


def test_postscript_is_not_executed_as_an_image(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: executed.append(arguments))
    for name in ("0", "1"):  # two of the classes of the run
        path = Path("images", name, "0.png")
        path.parent.mkdir(parents=True)
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n")
    assert "can't be read as an image" in usage_error("predict", "run", "images/0/0.png")
    assert "readable image" in usage_error("evaluate", "run", "--data", "images")
    assert executed == []


def test_unusable_metrics_are_one_sentence_in_the_explorer(hostile: Path) -> None:
    columns, *rows = (hostile / "metrics.csv").read_text().splitlines()
    values = ["nan" if name.endswith("loss") else "1" for name in columns.split(",")]
    (hostile / "metrics.csv").write_text("\n".join([columns, *rows, ",".join(values), ""]))
    explored = ExploredRun(load_run(hostile), "run", 2)
    assert explored.training["curve"][-1]["train_loss"] is None  # JSON has no NaN
    for content in (f"{columns}\n{'x' * 200_000}\n", None):
        (hostile / "metrics.csv").unlink()
        if content is None:
            (hostile / "metrics.csv").mkdir()
        else:
            (hostile / "metrics.csv").write_text(content)
        with pytest.raises(ValueError, match=r"metrics\.csv can't be read"):
            _ = ExploredRun(load_run(hostile), "run", 2).training


def test_weights_that_are_nan_are_one_sentence_in_an_exported_page(hostile: Path) -> None:
    explored = ExploredRun(load_run(hostile), "run", 2)
    for parameter in explored.model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="run can't be exported: statistics are not available"):
        export_page([explored], Path("page.html"))
