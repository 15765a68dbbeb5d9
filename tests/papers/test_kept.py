"""Long measurements that are killed: they go on where they were, and come to the same, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.papers.conftest import reproduced
from torchcaps.papers import find_paper
from torchcaps.papers.measures import cost
from torchcaps.papers.measures.geometry import two_domains
from torchcaps.papers.measures.robustness import gan_images, white_box
from torchcaps.papers.measures.training import early_training
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.store import Job, Store
from torchcaps.training import Trained, load_run


class Killed(Exception):
    """What ends a measurement in the middle."""


def killer(after: int) -> Callable[[], None]:
    """A tick that ends everything when it is called for so many times."""
    left = [after]

    def tick() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return tick


@pytest.fixture(autouse=True)
def _always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "due", True)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def check(measure: Callable[[Context], dict[str, Any]], tmp_path: Path, kills: tuple[int, ...]) -> None:
    """Kill it after so many ticks each time, in the end not at all, and compare with what was never killed."""
    whole = measure(Context("smoke", 3, tmp_path / "whole"))
    for after in kills:
        with pytest.raises(Killed):
            measure(Context("smoke", 3, tmp_path / "killed", tick=killer(after)))
    found = measure(Context("smoke", 3, tmp_path / "killed"))
    assert found.keys() == whole.keys()
    assert all(same(found[name], whole[name]) for name in whole)


def test_the_gan_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def measure(context: Context) -> dict[str, Any]:
        return gan_images(context, images=300, epochs=2, per_class=1, width=0.05, shown=1)

    check(measure, tmp_path, kills=(2, 2))  # three steps an epoch: in the first, in the second


def test_what_the_gan_was_killed_after_is_not_done_again(tmp_path: Path) -> None:
    steps = [0]

    def count() -> None:
        steps[0] += 1

    options: dict[str, Any] = {"images": 300, "epochs": 2, "per_class": 1, "width": 0.05, "shown": 1}
    with pytest.raises(Killed):
        gan_images(Context("smoke", 0, tmp_path, tick=killer(4)), **options)
    gan_images(Context("smoke", 0, tmp_path, tick=count), **options)
    assert steps[0] == 6 - 4  # the fifth step was taken, but not kept


@pytest.fixture
def net(store: Store) -> Trained:
    item = find_paper("chen2019").item("blackbox")
    reproduced(item, store)
    (run,) = (r.cells["attacked"].source.runs["net"] for r in item.rows if r.label == "CNN")  # type: ignore[union-attr]
    return load_run(store.folder(Job(run, 0)).path)


def test_the_generator_of_a_universal_perturbation(tmp_path: Path, net: Trained) -> None:
    def measure(context: Context) -> dict[str, Any]:
        return white_box(context, net, eps=32, iterations=5, every=2, learnt=64, images=20)

    check(measure, tmp_path, kills=(3, 3))
    assert not list((tmp_path / "killed").glob("*"))  # nothing is left of it


def test_the_first_steps_of_training(tmp_path: Path) -> None:
    def measure(context: Context) -> dict[str, Any]:
        return early_training(context, "yang2021_mnist", {}, steps=6, every=2, batch=8)

    check(measure, tmp_path, kills=(1, 3))  # in the first routing, and a later one
    assert not list((tmp_path / "killed").glob("*"))


def test_a_network_in_two_domains(tmp_path: Path, store: Store) -> None:
    item = find_paper("sabour2017").item("sec52")
    reproduced(item, store)
    (run,) = (r.cells["affNIST"].source.runs["net"] for r in item.rows if r.label == "CNN")  # type: ignore[union-attr]
    trained = load_run(store.folder(Job(run, 0)).path)

    def measure(context: Context) -> dict[str, Any]:
        return two_domains(context, trained, images=60, affine=300, sweep=4)

    check(measure, tmp_path, kills=(0, 1))  # in the first domain, and in the second
    assert not list((tmp_path / "killed").glob("*"))


def test_costs_of_one_net_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def costs(context: Context, cases: dict[str, Any], *_: Any) -> tuple[dict[str, float], dict[str, float]]:
        context.tick()
        measured.extend(name for name, _ in cases.values())
        return dict.fromkeys(cases, 1.0), dict.fromkeys(cases, 2.0)

    monkeypatch.setattr(cost, "_inference_and_memory", costs)
    nets = {"dynamic": "tsai2020_dynamic_cifar10", "em": "tsai2020_em_cifar10"}
    with pytest.raises(Killed):
        cost.iteration_cost(Context("smoke", 0, tmp_path, tick=killer(1)), nets, iterations=1)
    found = cost.iteration_cost(Context("smoke", 0, tmp_path), nets, iterations=1)
    assert measured == list(nets.values())
    assert found["dynamic seconds 1"] == found["em seconds 1"] == 1
    assert not list(tmp_path.glob("*"))


def test_what_was_begun_with_other_options_or_is_broken_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.pt"
    Kept(path, {"eps": 8}).write({"step": 5})
    assert Kept(path, {"eps": 8}).read() == {"step": 5}
    assert Kept(path, None).read() == {"step": 5}
    assert Kept(path, {"eps": 16}).read() is None
    whole = path.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"not a file of torch's"):
        path.write_bytes(broken)
        assert Kept(path, {"eps": 8}).read() is None
    path.unlink()
    assert Kept(path, {"eps": 8}).read() is None


def test_it_is_due_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [100.0]
    monkeypatch.setattr("torchcaps.reproduce.kept.time.monotonic", lambda: now[0])
    kept = Kept(tmp_path / "state.pt", {})
    assert not kept.due
    now[0] += 60
    assert kept.due
    kept.write({})
    assert not kept.due
