"""Registry of named things: routings, models, data sets, analyses, papers."""

import contextlib
import difflib
import fnmatch
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, TypeVar

from torchcaps._core.validation import join_quoted

__all__ = ["Registry", "UntrustedCodeError", "check_name", "import_instance", "import_object", "is_import_path"]

T = TypeVar("T")
MAX_NAMES_SHOWN = 8  # in the error for an unknown name
MIN_SIMILARITY = 0.4  # of a suggestion, as the ratio of difflib
SIMILARITY_RANGE = 0.2  # below the most similar name, in which other names are suggested too


class Registry(Generic[T]):
    """A mapping from names to registered things, filled by importing the modules of a package.

    Args:
        kind: noun for error messages, such as ``"model"``.
        package: import path of the package whose modules register the entries. Each of its modules is imported before
            the first look-up, so adding a file to the package is enough to register what it defines. ``None``: no
            discovery.

    >>> colors = Registry[str]("color")
    >>> colors.register("red", "#f00")
    >>> colors.get("red"), colors.list(), "blue" in colors
    ('#f00', ['red'], False)
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind, self._package = kind, package
        self._entries: dict[str, T] = {}
        self._discovering = False

    def discover(self) -> None:
        """Import every module of the package, once."""
        if self._package is None or self._discovering:
            return
        self._discovering = True  # modules may look up entries while they are imported
        try:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        except BaseException:
            self._discovering = False
            raise

    def register(self, name: str, entry: T, replace: Callable[[T, T], bool] | None = None) -> None:
        """Add an entry; a name can be registered once, unless ``replace(old, new)`` permits a replacement."""
        if name in self._entries and not (replace is not None and replace(self._entries[name], entry)):
            raise ValueError(f"a {self.kind} named {name!r} is already registered")
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Return the entry of a name; an unknown name raises a ValueError that suggests similar ones."""
        if name not in self._entries:
            self.discover()
        return self._entries[check_name(name, self._entries, self.kind)]

    def list(self, pattern: str | None = None) -> list[str]:
        """Return the registered names, sorted; ``pattern`` filters them by shell wildcards (``"tsai2020_*"``)."""
        self.discover()
        return sorted(name for name in self._entries if pattern is None or fnmatch.fnmatch(name, pattern))

    def values(self) -> tuple[T, ...]:
        """Return all entries, sorted by name."""
        return tuple(self._entries[name] for name in self.list())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that removes entries registered inside it on exit; for tests."""
        self.discover()
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before

    def __contains__(self, name: object) -> bool:
        self.discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())


class UntrustedCodeError(ValueError):
    """A file names code that is not registered; importing it could execute anything.

    Args:
        path: import path in the file.
        kind: noun for the message, such as ``"model"``.
    """

    def __init__(self, path: str, kind: str) -> None:
        module = path.rpartition(".")[0] if is_import_path(path) else path
        super().__init__(
            f"{kind} {path!r} is not registered, and importing its module {module!r} executes code: "
            "use --trust-remote-code (trust_remote_code=True in Python) if you trust the author of the file"
        )


def check_name(name: str, known: Collection[str], kind: str, max_shown: int = MAX_NAMES_SHOWN) -> str:
    """Return ``name`` if it is one of ``known``; otherwise raise a ValueError that suggests the closest ones.

    Args:
        name: the name.
        known: the valid names.
        kind: noun for the message, such as ``"model"``.
        max_shown: number of valid names that the message lists if none is similar.
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name, got {name!r}")
    if name not in known:
        by_lower = {other.lower(): other for other in known}
        close = [by_lower[other] for other in _closest(name.lower(), by_lower)]
        if close:
            raise ValueError(f"unknown {kind} {name!r}: did you mean {join_quoted(close)}?")
        shown = sorted(known)[:max_shown]
        more = ", ..." if len(known) > len(shown) else ""
        raise ValueError(f"unknown {kind} {name!r}: expected one of {', '.join(map(repr, shown))}{more}")
    return name


def _closest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three similar names: the most similar one, and others that are almost as similar."""
    matches = difflib.get_close_matches(name, known, n=3, cutoff=MIN_SIMILARITY)
    ratios = {match: difflib.SequenceMatcher(None, match, name).ratio() for match in matches}
    return [match for match, ratio in ratios.items() if ratio >= max(ratios.values()) - SIMILARITY_RANGE]


def is_import_path(name: object) -> bool:
    """Return whether a name has the form of an import path, ``my_module.MyClass``."""
    return isinstance(name, str) and "." in name and all(part.isidentifier() for part in name.split("."))


def import_object(path: str) -> Any:
    """Return the object that an import path such as ``my_module.MyRouting`` names."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{path} can't be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{path} can't be imported: {module} has no {name!r}") from error


def import_instance(path: str, base: type[T]) -> T:
    """Return the instance of ``base`` at an import path: the object itself, or a subclass called without arguments."""
    value = import_object(path)
    if isinstance(value, base):
        return value
    if not (isinstance(value, type) and issubclass(value, base)):
        raise ValueError(
            f"{path} must be a subclass or an instance of {base.__module__}.{base.__name__}, got {value!r}"
        )
    try:
        return value()
    except TypeError as error:
        raise ValueError(f"{path} must have a default for each of its fields: {error}") from error
