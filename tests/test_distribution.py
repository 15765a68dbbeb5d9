"""The release: contents of wheel and source distribution, equal versions in all files."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torchcaps
from tests.sampling import all_cases

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 8_000_000
BUILDS = pytest.mark.skipif(not all_cases(), reason="builds the distributions: runs with --all-cases")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source distribution, and from it the wheel."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@BUILDS
def test_wheel_has_the_package_its_data_and_the_licence(distributions: tuple[Path, Path]) -> None:
    wheel, _ = distributions
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {path for path in (ROOT / "torchcaps").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    information = f"torchcaps-{torchcaps.__version__}.dist-info"
    assert {str(path.relative_to(ROOT)) for path in files} | {f"{information}/licenses/LICENSE"} <= names
    assert "torchcaps/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"torchcaps", information}


@BUILDS
def test_source_distribution_has_every_file_of_the_repository(distributions: tuple[Path, Path]) -> None:
    """The documents state that tests, demo and site work in the unpacked source distribution."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git clone")
    _, source = distributions
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    present = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    assert sorted(present - names) == []


def test_versions_are_equal() -> None:
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    (version,) = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
    (date,) = re.findall(r'^date-released: "(.*)"$', citation, re.MULTILINE)
    releases = re.findall(r"^## \[(\d.*)\] - (.*)$", changelog, re.MULTILINE)
    assert (version, releases[0]) == (torchcaps.__version__, (torchcaps.__version__, date))
