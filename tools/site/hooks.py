"""Hooks of MkDocs: generated pages, documents of the repository's root, figures of the records, KaTeX."""

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import tutorials  # noqa: E402
from katex import fetch_katex  # noqa: E402
from reference import generated_pages  # noqa: E402

# Documents outside docs/ that are pages of the site.
DOCUMENTS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FILES = "files"  # directory of the site with files of the repository that pages link to


def on_files(files: Files, config: Any) -> Files:
    """Add everything that is not a file in docs/."""
    for path, content in fetch_katex().items():
        files.append(File.generated(config, f"assets/katex/{path}", content=content))
    for path, text in {**generated_pages(), **tutorials.pages()}.items():
        files.append(File.generated(config, path, content=text))
    for source, path in DOCUMENTS.items():
        files.append(File.generated(config, path, content=(ROOT / source).read_text()))
    config._linked = {}
    for file in list(files.documentation_pages()):
        for target in outside_links(file):
            path = f"{FILES}/{target}"
            if path not in config._linked:
                config._linked[path] = True
                files.append(File.generated(config, path, abs_src_path=str(ROOT / target)))
    return files


def repository_path(file: File) -> str:
    """Return the path of a page's source in the repository."""
    return {path: source for source, path in DOCUMENTS.items()}.get(file.src_uri, f"docs/{file.src_uri}")


def resolve(file: File, link: str) -> str | None:
    """Return the path of a linked file in the repository; ``None`` for addresses."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(file)), link))


def outside_links(file: File) -> set[str]:
    """Return the files of the repository, outside docs/ and not pages themselves, that a page links to."""
    targets = {resolve(file, link[1]) for link in LINK.findall(file.content_string)}
    return {t for t in targets if t and not t.startswith("docs/") and t not in DOCUMENTS and (ROOT / t).is_file()}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ to the copies in the site."""

    def replace(match: re.Match[str]) -> str:
        target = resolve(page.file, match[2])
        if target is None:
            return match[0]
        if target in DOCUMENTS:
            new = DOCUMENTS[target]
        elif target == "README.md":
            new = "index.md"
        elif target.startswith("docs/"):
            new = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            new = f"{FILES}/{target}"
        else:
            return match[0]
        start = posixpath.dirname(page.file.src_uri)
        return match[1] + posixpath.relpath(new, start or ".") + match[3]

    return LINK.sub(replace, markdown)


def on_config(config: Any) -> Any:
    """Do not load anything of the network in the build."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return config
