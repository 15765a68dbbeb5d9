"""What the rows of tables train, and how jobs come out of them: a second look at the literals."""

from typing import Any

import pytest
import torch

from torchcaps.papers import find_paper, list_papers
from torchcaps.reproduce.context import mean_of
from torchcaps.reproduce.planner import jobs_of, members_of
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Measure, Run
from torchcaps.reproduce.store import Job, Store
from torchcaps.routing import EM, Dynamic, InvertedAttention, Quadratic
from torchcaps.training.setup import make_network

CAPSNET = "CapsNet, {} iteration{}, {}reconstruction"


def source(paper: str, item: str, row: str, column: str) -> Any:
    (found,) = (r for r in find_paper(paper).item(item).rows if r.label == row)
    return found.cells[column].source


def trained(paper: str, item: str, row: str, column: str) -> dict[str, Any]:
    """What a row trains, in the paper's own setting."""
    spec = run_spec(source(paper, item, row, column), "full")
    with torch.device("meta"):
        model = make_network(spec)
    routing = getattr(model.spec, "algorithm", None)
    return {
        "model": spec.model,
        "routing": routing,
        "decoder": getattr(model, "decoder", None) is not None,
        "data": spec.recipe.data,
        "augmentation": spec.recipe.augmentation,
        "schedule": getattr(model.spec, "schedule", None),
    }


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("decoder", [True, False])
def test_sabours_table_1(iterations: int, decoder: bool) -> None:
    row = CAPSNET.format(iterations, "s" * (iterations > 1), "" if decoder else "no ")
    found = trained("sabour2017", "table1", row, "MNIST")
    assert (found["routing"], found["decoder"], found["data"]) == (Dynamic(iterations), decoder, "mnist")
    if decoder:
        found = trained("sabour2017", "table1", row, "MultiMNIST")
        assert (found["routing"], found["decoder"], found["data"]) == (Dynamic(iterations), True, "multimnist")


@pytest.mark.parametrize(
    ("row", "routing", "decoder"),
    [
        ("Dynamic", Dynamic(3), True),
        ("L2", Quadratic("l2", initial=0.1), True),
        ("L1", Quadratic("l1", initial=0.1), True),
        ("L2/FC", Quadratic("l2", initial=0.1), False),
        ("L1/FC", Quadratic("l1", initial=0.1), False),
    ],
)
def test_yangs_table_2(row: str, routing: Any, decoder: bool) -> None:
    for column, data in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist")):
        found = trained("yang2021", "table2", row, column)
        assert (found["routing"], found["decoder"], found["data"]) == (routing, decoder, data)


def test_chois_augmentation_and_depths() -> None:
    for row, model in (("CapsuleNet", "sabour2017_mnist"), ("AR CapsNet", "choi2019_mnist")):
        for column, name in (("MNIST", "choi2019.mnist"), ("MNIST+", "choi2019.mnist+")):
            found = trained("choi2019", "table1", row, column)
            assert (found["model"], found["augmentation"]) == (model, name)
    spec = run_spec(source("choi2019", "table2", "L = 2, D = 16", "C10+"), "full")
    assert spec.model_options == {"depth": 2, "dim": 16}
    assert spec.recipe.augmentation == "choi2019.cifar10+"


@pytest.mark.parametrize("count", range(1, 6))
def test_tsais_iterations(count: int) -> None:
    for label, kind in (("Inverted attention", InvertedAttention), ("Dynamic routing", Dynamic), ("EM routing", EM)):
        found = trained("tsai2020", "fig4", f"{label}, {count} iteration{'s' * (count > 1)}", "CIFAR-10")
        assert found["routing"] == kind(count)


def test_tsais_ablations() -> None:
    plain = trained("tsai2020", "ablations", "the paper's, 2 iterations", "CIFAR-10")
    assert (plain["routing"], plain["schedule"]) == (InvertedAttention(2), "auto")
    a, b, c = (
        trained("tsai2020", "ablations", f"{row}, 2 iterations", "CIFAR-10")
        for row in ("A, no layer norm", "B, sequential", "C, activations as in EM")
    )
    assert a["routing"] == InvertedAttention(2, normalize=False)
    assert (b["routing"], b["schedule"]) == (InvertedAttention(2), "sequential")
    assert c["routing"] == InvertedAttention(2, activations=True)


def test_chens_rows() -> None:
    for row, model, decoder in (
        ("CapsNets**", "chen2019_dynamic_mnist", True),
        ("FC G-CapsNets", "chen2019_fc_mnist", True),
        ("FC G-CapsNets*", "chen2019_fc_mnist", False),
        ("Conv G-CapsNets", "chen2019_conv_mnist", True),
        ("Conv G-CapsNets*", "chen2019_conv_mnist", False),
    ):
        found = trained("chen2019", "table2", row, "MNIST")
        assert (found["model"], found["decoder"]) == (model, decoder)
    measure = source("chen2019", "blackbox", "FC G-CapsNets*", "attacked")
    assert (measure.runs["source"].model, measure.runs["net"].model) == ("chen2019_lenet", "chen2019_fc_mnist")


def test_runs_that_differ_have_names_that_differ() -> None:
    base = Run("sabour2017_mnist", {}, {"epochs": 4, "max_train_images": 20_000})
    others = [base.but(cpu={"epochs": 5}), base.but(cpu={"max_train_images": 10_000}), base.but(val_fraction=0.1)]
    assert len({run_spec(run, "cpu").record_name() for run in (base, *others)}) == 4
    identities: dict[str, dict[str, Any]] = {}
    for paper in list_papers():
        for item in paper.items:
            for found in item.sources():
                if isinstance(found, Run):
                    spec = run_spec(found, "cpu")
                    assert identities.setdefault(spec.record_name(), spec.identity()) == spec.identity()


def nothing(context: Any) -> dict[str, Any]:
    return {}


def test_ensembles_share_no_member_and_what_is_done_once_is_done_once() -> None:
    run = Run("capsnet_small")
    seven = Measure("m", nothing, {"nets": run}, members=7)
    seeds = [[job.seed for job in members_of(seven, run, seed, "cpu")] for seed in (0, 1)]
    assert seeds == [list(range(7)), list(range(7, 14))]
    once = Measure("o", nothing, once=True)
    assert jobs_of([once], 3, "cpu") == [Job(once, 0)]
    after = Measure("a", nothing, after={"once": once})
    assert jobs_of([after], 2, "cpu") == [Job(once, 0), Job(after, 0), Job(after, 1)]


def test_a_measurement_of_another_network_is_another_one(tmp_path: Any) -> None:
    store = Store("smoke", tmp_path / "r", tmp_path / "w")
    one, other = (Measure("m", nothing, {"net": Run("capsnet_small", {"width": n})}) for n in (16, 8))
    store.write_measure(Job(one, 0), {"a": 1.0}, 0.0)
    assert store.record(Job(one, 0)) is not None
    before, changed = (Measure("b", nothing, options={"n": n}) for n in (1, 2))
    first, second = (Measure("c", nothing, after={"b": b}) for b in (before, changed))
    store.write_measure(Job(first, 0), {"a": 1.0}, 0.0)
    assert store.record(Job(first, 0)) is not None
    assert store.record(Job(second, 0)) is None
    assert store.options(Job(one, 0)) == store.options(Job(other, 0)), "narrow, they are the same"


def test_a_mean_has_the_interval_of_its_images() -> None:
    found = mean_of("a", torch.tensor([[1.0, 3.0], [4.0, 4.0], [6.0, 6.0]]))
    assert found["a"] == pytest.approx(4.0)
    assert found["a_half"] == pytest.approx(1.959964 * 2.0 / 3**0.5)
    assert mean_of("b", torch.empty(0)) == {"b": None}
