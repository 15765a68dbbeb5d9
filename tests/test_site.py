"""The site: `make docs` builds it without warnings; its pages load nothing from elsewhere and show their equations."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.live import launched
from tests.sampling import all_cases

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EQUATIONS = [path.relative_to(ROOT / "docs") for path in PAGES if "\\[" in path.read_text()]
ELSEWHERE = r"[\"']?((?:https?:)?//[^\"'\s>)]+)"
LOADED = re.compile(r"<(?:script|img|iframe|source|video|audio|link)\b[^>]*?\b(?:src|href)=" + ELSEWHERE)
LOADED_BY_CSS = re.compile(r"(?:url\(|@import)\s*" + ELSEWHERE)
N_FAILED_FONTS = "[...document.fonts].filter(font => font.status === 'error').length"
ALL_RENDERED = "[...document.querySelectorAll('.arithmatex')].every(span => span.querySelector('.katex'))"
ALL_LOADED = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"

pytestmark = pytest.mark.skipif(not all_cases(), reason="builds the site: runs with --all-cases")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with warnings as errors, as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def test_pages_refer_to_nothing_elsewhere(site: Path) -> None:
    pages, styles = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > len(EQUATIONS) > 0
    assert styles != []
    found = {f"{path.relative_to(site)}: {link}" for path in pages for link in LOADED.findall(path.read_text())}
    found |= {f"{path.name}: {link}" for path in styles for link in LOADED_BY_CSS.findall(path.read_text())}
    assert found == set()


def test_pages_show_equations_and_pictures_without_network(site: Path, browser: Any) -> None:
    """KaTeX renders every equation, and each picture loads, while the browser is offline."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    for path in EQUATIONS:
        page.goto((site / path.with_suffix(".html")).as_uri())
        assert page.locator(".arithmatex").count() > 0, path
        page.wait_for_function(ALL_RENDERED)
        page.wait_for_function(ALL_LOADED)
        page.wait_for_function("document.fonts.status === 'loaded'")
        assert page.locator(".katex-error").count() == 0, path
        assert page.evaluate(N_FAILED_FONTS) == 0, path
        shown = page.evaluate("document.querySelector('article').innerText")
        assert "\\(" not in shown, path
        assert "\\[" not in shown, path
    context.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
