import contextlib
import sys
from pathlib import Path

import pytest

from torchcaps._core.registry import Registry, check_name, import_instance, import_object, is_import_path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a package with two modules that register an entry each; return its import path."""
    directory = tmp_path / "registry_example"
    directory.mkdir()
    (directory / "__init__.py").write_text("from torchcaps._core.registry import Registry\nENTRIES = Registry('entry')")
    for name in ("first", "second"):
        (directory / f"{name}.py").write_text(f"from registry_example import ENTRIES\nENTRIES.register('{name}', 1)")
    monkeypatch.syspath_prepend(tmp_path)
    yield "registry_example"
    for module in [name for name in sys.modules if name.startswith("registry_example")]:
        del sys.modules[module]


def test_modules_of_the_package_are_discovered_on_first_use(package: str) -> None:
    module = __import__(package)
    module.ENTRIES = Registry("entry", package)
    assert f"{package}.first" not in sys.modules
    assert module.ENTRIES.list() == ["first", "second"]
    assert module.ENTRIES.get("first") == 1


def test_entries_are_sorted_by_name() -> None:
    registry = Registry[int]("number")
    for name, value in {"two": 2, "one": 1, "three": 3}.items():
        registry.register(name, value)
    assert list(registry) == registry.list() == ["one", "three", "two"]
    assert registry.list("t*") == ["three", "two"]
    assert registry.values() == (1, 3, 2)
    assert len(registry) == 3
    assert "four" not in registry


def test_name_is_registered_once_unless_replacement_is_allowed() -> None:
    registry = Registry[int]("number")
    registry.register("one", 1)
    with pytest.raises(ValueError, match="'one'"):
        registry.register("one", 2)
    with pytest.raises(ValueError, match="'one'"):
        registry.register("one", 2, replace=lambda old, new: new < old)
    assert registry.get("one") == 1
    registry.register("one", 2, replace=lambda old, new: new > old)
    assert registry.get("one") == 2


def test_restored_removes_new_entries() -> None:
    registry = Registry[int]("number")
    registry.register("one", 1)
    with contextlib.suppress(ZeroDivisionError), registry.restored():
        registry.register("two", 2)
        raise ZeroDivisionError
    assert registry.list() == ["one"]


def test_unknown_name_suggests_similar_ones_or_lists_some() -> None:
    names = [f"dataset{n}" for n in range(30)]
    with pytest.raises(ValueError, match=r"'DataSet7'.*'dataset7'"):
        check_name("DataSet7", names, "data set")
    with pytest.raises(ValueError, match=r"data set 'zzz'.*'dataset0'") as raised:
        check_name("zzz", names, "data set")
    assert str(raised.value).count("'dataset") < 30
    with pytest.raises(TypeError, match=r"data set.*7"):
        check_name(7, names, "data set")  # type: ignore[arg-type]
    assert check_name("dataset3", names, "data set") == "dataset3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("my_module.MyClass", True), ("a.b.C", True), ("dynamic", False), ("a..b", False), ("a.1", False), (3, False)],
)
def test_is_import_path(name: object, expected: bool) -> None:
    assert is_import_path(name) == expected


def test_import_object() -> None:
    assert import_object("torchcaps._core.registry.Registry") is Registry
    for path in ("no_such_module.Thing", "torchcaps._core.registry.Thing"):
        with pytest.raises(ValueError, match=path):
            import_object(path)


class Base:
    """Base class of instances that are imported."""


class WithDefault(Base):
    def __init__(self, size: int = 3) -> None:
        self.size = size


class WithoutDefault(Base):
    def __init__(self, size: int) -> None:
        self.size = size


INSTANCE = WithoutDefault(5)


def test_import_instance() -> None:
    module = __name__
    assert import_instance(f"{module}.INSTANCE", Base) is INSTANCE
    created = import_instance(f"{module}.WithDefault", Base)
    assert isinstance(created, WithDefault)
    assert created.size == 3
    for name, mention in (("WithoutDefault", "size"), ("pytest", "Base"), ("test_import_instance", "Base")):
        with pytest.raises(ValueError, match=mention) as raised:
            import_instance(f"{module}.{name}", Base)
        assert f"{module}.{name}" in str(raised.value)


def test_suggestions_ignore_case() -> None:
    with pytest.raises(ValueError, match="did you mean 'FIRST_VALUE'"):
        check_name("first_valu", ["FIRST_VALUE", "other"], "entry")
