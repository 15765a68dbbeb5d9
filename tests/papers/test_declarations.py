"""Runs that the rows of the papers' tables declare."""

import re
from typing import Any

import pytest
import torch

from torchcaps.data.registry import find_spec
from torchcaps.models import create_model
from torchcaps.papers import find_paper, list_papers
from torchcaps.papers.measures.cost import epoch_seconds, routing_seconds, step_seconds
from torchcaps.papers.sabour2017.pose import NETS
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Measurement, Run
from torchcaps.routing import EM, Dynamic, InvertedAttention, Quadratic
from torchcaps.training.setup import build_network

CAPSNET = "CapsNet, {} iteration{}, {}reconstruction"


def source_of(paper: str, item: str, row: str, column: str) -> Any:
    (match,) = (r for r in find_paper(paper).item(item).rows if r.label == row)
    return match.cells[column].source


def declared_run(paper: str, item: str, row: str, column: str) -> dict[str, Any]:
    """Return model, routing and settings of a row's run at the scale full."""
    spec = run_spec(source_of(paper, item, row, column), "full")
    with torch.device("meta"):
        model = build_network(spec)
    routing = getattr(model.spec, "effective_routing", None)
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
def test_sabour2017_table_1(iterations: int, decoder: bool) -> None:
    row = CAPSNET.format(iterations, "s" * (iterations > 1), "" if decoder else "no ")
    run = declared_run("sabour2017", "table1", row, "MNIST")
    assert (run["routing"], run["decoder"], run["data"]) == (Dynamic(iterations), decoder, "mnist")
    if decoder:
        run = declared_run("sabour2017", "table1", row, "MultiMNIST")
        assert (run["routing"], run["decoder"], run["data"]) == (Dynamic(iterations), True, "multimnist")


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
def test_yang2021_table_2(row: str, routing: Any, decoder: bool) -> None:
    for column, data in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist")):
        run = declared_run("yang2021", "table2", row, column)
        assert (run["routing"], run["decoder"], run["data"]) == (routing, decoder, data)


def test_yang2021_recall_per_class_and_ascent() -> None:
    """The ascent follows the schedule everywhere but in the columns that show the effect of a constant one."""
    fashion = source_of("yang2021", "table2", "L1", "Fashion-MNIST")
    classes = find_spec("fashion-mnist").classes
    (row,) = (row for row in find_paper("yang2021").item("recall").rows if row.label == "L1")
    cells = {cell.metric: (name, cell.source) for name, cell in row.cells.items()}
    assert {metric: source for metric, (_, source) in cells.items()} == {f"recall {i}": fashion for i in range(10)}
    assert [cells[f"recall {i}"][0] for i in range(10)] == [name.removesuffix("/top") for name in classes]
    for column, ascent_lr in (("following", "scheduled"), ("constant", "constant")):
        recipe = run_spec(source_of("yang2021", "rates", "L1", column), "cpu").recipe
        assert (recipe.ascents, recipe.descents, recipe.ascent_lr) == (1, 1, ascent_lr)
    assert source_of("yang2021", "rates", "L1", "following") == fashion


def test_yang2021_at_scale_long_trains_on_all_images() -> None:
    for column, epochs in (("MNIST", 10), ("Fashion-MNIST", 20), ("CIFAR-10", 20)):
        spec = run_spec(source_of("yang2021", "table2", "L1/FC", column), "long")
        assert (spec.max_train_images, spec.max_test_images, spec.recipe.epochs) == (None, None, epochs), column


def test_choi2019_augmentation_and_depth() -> None:
    for row, model in (("CapsuleNet", "sabour2017_mnist"), ("AR CapsNet", "choi2019_mnist")):
        for column, name in (("MNIST", "choi2019.mnist"), ("MNIST+", "choi2019.mnist+")):
            run = declared_run("choi2019", "table1", row, column)
            assert (run["model"], run["augmentation"]) == (model, name)
    spec = run_spec(source_of("choi2019", "table2", "L = 2, D = 16", "C10+"), "full")
    assert spec.model_options == {"depth": 2, "dim": 16}
    assert spec.recipe.augmentation == "choi2019.cifar10+"


def test_choi2019_quotes_the_ensemble_of_sabour2017() -> None:
    """24x24 crops and a none-of-the-above category, in both papers one measurement."""
    seven = source_of("choi2019", "table1", "CapsuleNet, 7 models", "C10+")
    assert seven is source_of("sabour2017", "sec7", "CIFAR-10, 7 models", "error")
    spec = run_spec(seven.runs["nets"], "full")
    assert (seven.ensemble_size, spec.recipe.augmentation) == (7, "sabour2017.cifar10")
    model: Any = spec.model_spec()
    assert (model.image, model.effective_routing) == ((3, 24, 24), Dynamic(3, leak=True))


def test_choi2019_pregenerated_images_differ_in_the_augmentation_only() -> None:
    rows = ("AR CapsNet", "AR CapsNet, pre-generated training images")
    fly, once = (run_spec(source_of("choi2019", "table1", row, "affNIST"), "full").identity() for row in rows)
    different = {name: (fly[name], once[name]) for name in fly if fly[name] != once[name]}
    assert different == {"augmentation": ("choi2019.affnist", "choi2019.affnist-pregenerated")}


def test_sabour2017_none_of_the_above_is_the_only_difference() -> None:
    label = "CIFAR-10, one model"
    runs = (declared_run("sabour2017", "sec7", row, "error") for row in (label, f"{label} without none-of-the-above"))
    with_leak, without = runs
    assert (with_leak.pop("routing"), without.pop("routing")) == (Dynamic(3, leak=True), Dynamic(3))
    assert with_leak == without


@pytest.mark.parametrize(
    ("paper", "item", "row", "column"),
    [
        ("sabour2017", "table1", "CapsNet, 3 iterations, reconstruction", "MNIST"),
        ("sabour2017", "table1", "CapsNet, 3 iterations, reconstruction", "MultiMNIST"),
        ("sabour2017", "table1", "Baseline CNN", "MultiMNIST"),
        ("sabour2017", "sec7", "CIFAR-10, one model without none-of-the-above", "error"),
        ("sabour2017", "figa2", "1 iteration", "CIFAR-10"),
        ("choi2019", "table1", "CapsuleNet", "C10+"),
        ("choi2019", "table2", "L = 0, D = 16", "C10"),
        ("choi2019", "table2", "L = 4, D = 32", "C10+"),
    ],
)
def test_the_scale_long_trains_the_networks_of_the_scale_cpu_longer(
    paper: str, item: str, row: str, column: str
) -> None:
    cpu, long = (run_spec(source_of(paper, item, row, column), scale) for scale in ("cpu", "long"))
    assert cpu.identity()["model_spec"] == long.identity()["model_spec"]
    assert long.max_train_images is None
    if long.recipe.steps is not None:
        assert long.recipe.steps >= 4 * (cpu.recipe.steps or 0) > 0
    else:
        assert (long.recipe.epochs or 0) > (cpu.recipe.epochs or 0) > 0


def test_sabour2017_section_52_stops_at_99_percent() -> None:
    measurement = source_of("sabour2017", "sec52", "CapsNet", "affNIST")
    specs = {scale: run_spec(measurement.runs["net"], scale) for scale in ("cpu", "long", "full")}
    assert {scale: spec.target_accuracy for scale, spec in specs.items()} == {"cpu": 0.97, "long": 0.99, "full": 0.9923}
    assert specs["long"].max_train_images is None


@pytest.mark.parametrize("scale", ["cpu", "long", "full"])
def test_sabour2017_figure_a1_has_points_of_one_training(scale: Scale) -> None:
    """Runs that differ in the number of steps only, under a learning rate that does not depend on it."""
    measurement = source_of("sabour2017", "figa1", "iteration 1", "untrained")
    identities = [run_spec(run, scale).identity() for run in measurement.runs.values()]
    steps = [identity.pop("steps") for identity in identities]
    assert identities == identities[:1] * len(identities)
    assert identities[0]["lr_schedule"]["class_path"] == "torchcaps.models.schedules.Exponential"
    assert [round(steps[-1] / n) for n in steps] == [64, 16, 4, 1]


@pytest.mark.parametrize("count", range(1, 6))
def test_tsai2020_iterations(count: int) -> None:
    for label, kind in (("Inverted attention", InvertedAttention), ("Dynamic routing", Dynamic), ("EM routing", EM)):
        run = declared_run("tsai2020", "fig4", f"{label}, {count} iteration{'s' * (count > 1)}", "CIFAR-10")
        assert run["routing"] == kind(count)


def test_tsai2020_ablations() -> None:
    plain = declared_run("tsai2020", "ablations", "the paper's, 2 iterations", "CIFAR-10")
    assert (plain["routing"], plain["schedule"]) == (InvertedAttention(2), "auto")
    a, b, c = (
        declared_run("tsai2020", "ablations", f"{row}, 2 iterations", "CIFAR-10")
        for row in ("A, no layer norm", "B, sequential", "C, activations as in EM")
    )
    assert a["routing"] == InvertedAttention(2, normalize=False)
    assert (b["routing"], b["schedule"]) == (InvertedAttention(2), "sequential")
    assert c["routing"] == InvertedAttention(2, activations=True)
    labels = [row.label for row in find_paper("tsai2020").item("ablations").rows]
    for ablation, first in (("the paper's", 1), ("A", 1), ("B", 2), ("C", 1)):  # B equals the paper's with one
        counts = [int(label.split(", ")[-1].split()[0]) for label in labels if label.startswith(ablation)]
        assert counts == list(range(first, 6)), ablation


def test_tsai2020_initial_poses_and_losses() -> None:
    for row, initial in (("zero", "zero"), ("random, fixed", "random"), ("learned", "learned")):
        run = declared_run("tsai2020", "initial", row, "CIFAR-10")
        assert run["routing"] == InvertedAttention(2, initial=initial), row  # type: ignore[arg-type]
    for row, head, loss in (
        ("cross-entropy", "linear", "cross_entropy"),
        ("margin loss", "sigmoid", "margin"),
        ("spread loss", "sigmoid", "spread"),
    ):
        spec = run_spec(source_of("tsai2020", "losses", row, "CIFAR-10"), "cpu")
        assert (spec.model_spec().head, spec.recipe.loss.name) == (head, loss), row  # type: ignore[attr-defined]


@pytest.mark.parametrize(("scale", "width", "features"), [("cpu", 64, 160), ("long", 64, 160), ("full", 1024, 640)])
def test_tsai2020_networks_for_overlapping_digits_have_equal_neurons_per_layer(
    scale: Any, width: int, features: int
) -> None:
    """All but the large matrix network, which has as many parameters as the one with vectors."""
    sizes = {}
    for row in find_paper("tsai2020").item("fig5").rows:
        for column in ("SGD", "Adam"):
            spec = run_spec(row.cells[column].source, scale)  # type: ignore[arg-type]
            with torch.device("meta"):
                model = build_network(spec)
            sizes[row.label] = model.n_parameters
            assert spec.recipe.optimizer.name == column.lower()
            assert spec.recipe.optimizer.lr == {"SGD": 0.1, "Adam": 0.001}[column]
            neurons = [module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
            options: Any = model.spec
            if row.label.startswith("CNN"):
                assert (set(neurons[:3]), options.features) == ({width}, features), row.label
            elif "42M" not in row.label:
                assert neurons == [width, options.types * options.dim] == [width, width], row.label
                assert options.classes * options.dim == features, row.label
    vectors = sizes["CapsNet, vectors"]
    for label in ("CapsNet, matrices, 42M", "CNN, fully connected", "CapsNet, dynamic routing, vectors"):
        assert abs(sizes[label] / vectors - 1) < 0.022, (label, sizes[label], vectors)
    assert scale == "full" or sizes["CapsNet, matrices, 42M"] == vectors


def test_tsai2020_dynamic_routing_for_overlapping_digits() -> None:
    """Lengths with the margin loss; the linear head with the binary cross-entropy is a control."""
    for row, head, loss in (
        ("CapsNet, dynamic routing, vectors", "length", "margin"),
        ("CapsNet, dynamic routing, vectors, linear head", "linear", "binary"),
    ):
        for column in ("SGD", "Adam"):
            spec = run_spec(source_of("tsai2020", "fig5", row, column), "cpu")
            found = spec.model_spec().head, spec.recipe.loss.name  # type: ignore[attr-defined]
            assert found == (head, loss), (row, column)


def test_claims_about_times_compare_ratios_of_several_sessions() -> None:
    """Times of one session differ from those of the next by a factor of two, on the same machine."""
    timed = {epoch_seconds, routing_seconds, step_seconds}
    compared = 0
    claims = [(item, claim) for paper in list_papers() for item in paper.items for claim in item.claims]
    for item, claim in claims:
        cells = [item.cell(*location) for location in (claim.better, claim.worse)]
        sources = [cell.source for cell in cells if isinstance(cell.source, Measurement)]
        if not any(source.function in timed for source in sources):
            continue
        compared += 1
        assert sources[0] == sources[1]
        assert not sources[0].seed_independent
        assert all(re.search("ratio|fraction|reference|saved", cell.metric) for cell in cells), claim.text
    assert compared > 0


def narrow_linear_heads() -> dict[str, Any]:
    """Return the specifications of the narrow networks with a linear head, without the control."""
    runs = {s for p in list_papers() for item in p.items for s in item.sources() if isinstance(s, Run)}
    specs = [run_spec(run, "cpu") for run in sorted(runs, key=repr) if "classifier" not in run.changes]
    return {
        repr(spec.model_spec()): spec.model_spec()
        for spec in specs
        if getattr(spec.model_spec(), "head", "") == "linear"
    }


def test_initial_logits_of_narrow_networks_differ() -> None:
    """With equal initial logits, gradients vanish and a network does not learn in the time of the scale cpu."""
    heads = narrow_linear_heads()
    assert {type(spec).__name__ for spec in heads.values()} >= {"Tsai2020", "Tsai2020Diverse"}
    spreads = {}
    for name, spec in heads.items():
        torch.manual_seed(0)
        with torch.no_grad():
            spreads[name] = float(spec.build()(torch.rand(2, *spec.image)).scores.std())
    assert {name: spread for name, spread in spreads.items() if not 0.02 < spread < 3} == {}


@pytest.mark.parametrize(
    ("row", "column"),
    [("CNN", "MNIST"), ("CapsNets**", "MNIST"), ("FC G-CapsNets", "CIFAR-10"), ("Multi-layer G-CapsNets", "CIFAR-10")],
)
def test_chen2019_at_scale_long_has_the_published_steps_and_schedule(row: str, column: str) -> None:
    source = source_of("chen2019", "table2", row, column)
    long, full = run_spec(source, "long"), run_spec(source, "full")
    assert (long.recipe.steps, long.recipe.epochs, long.max_train_images) == (10_000, None, None)
    assert long.recipe.lr_schedule == full.recipe.lr_schedule


def test_chen2019_white_box_attacks_four_networks_with_two_objectives() -> None:
    runs = {"CNN": "chen2019_cnn_mnist", "CapsNets**": "chen2019_dynamic_mnist", "FC G-CapsNets*": "chen2019_fc_mnist"}
    for row, model in runs.items():
        for objective, expected in (("random class", None), ("untargeted", "untargeted")):
            measurement = source_of("chen2019", "whitebox", f"{row}, {objective}, 32 levels", "attacked")
            assert measurement.runs["net"].model == model
            assert (measurement.options["eps"], measurement.options.get("objective")) == (32, expected)


def test_chen2019_models() -> None:
    for row, model, decoder in (
        ("CapsNets**", "chen2019_dynamic_mnist", True),
        ("FC G-CapsNets", "chen2019_fc_mnist", True),
        ("FC G-CapsNets*", "chen2019_fc_mnist", False),
        ("Conv G-CapsNets", "chen2019_conv_mnist", True),
        ("Conv G-CapsNets*", "chen2019_conv_mnist", False),
    ):
        run = declared_run("chen2019", "table2", row, "MNIST")
        assert (run["model"], run["decoder"]) == (model, decoder)
    measurement = source_of("chen2019", "blackbox", "FC G-CapsNets*", "attacked")
    assert (measurement.runs["source"].model, measurement.runs["net"].model) == ("chen2019_lenet", "chen2019_fc_mnist")


def test_networks_that_pose_compares_have_equally_many_parameters() -> None:
    counts = {}
    for label, run in NETS.items():
        spec = run_spec(run, "cpu")
        model = create_model(spec.model, recipe=spec.recipe, image=(1, 64, 64), classes=3, **spec.model_options)
        counts[label] = model.n_parameters
    largest, smallest = max(counts.values()), min(counts.values())
    assert largest < 1.02 * smallest, counts
