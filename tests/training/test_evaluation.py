"""Evaluation: accuracy as the papers count it, confidence intervals, counts per class; and the figures of a run."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import torchcaps
from tests.training.helpers import small_spec
from torchcaps._core.stats import wilson_interval
from torchcaps.data import Loader, create_dataset
from torchcaps.metrics import exact_set_match, top_k_set_match
from torchcaps.training import train
from torchcaps.training.evaluation import RunningEvaluation, evaluate


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_of_newcombe_1998_table_1(n_correct: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(n_correct, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_at_the_boundaries() -> None:
    assert wilson_interval(20, 20)[1] == 1
    assert wilson_interval(0, 0) == (0, 1)


def test_counts_per_class_and_confusion_matrix() -> None:
    model = torchcaps.create_model("capsnet_small", classes=3)
    running = RunningEvaluation(model)
    scores = torch.tensor([[0.9, 0.1, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.2], [0.1, 0.2, 0.3]])
    running.update(scores[:3], torch.tensor([0, 1, 2]), 2.0)
    running.update(scores[3:], torch.tensor([2]), 6.0)
    evaluation = running.compute()
    assert (evaluation.n, evaluation.n_correct, evaluation.loss) == (4, 3, 3.0)  # the loss is weighted by images
    assert evaluation.class_counts == [1, 1, 2]
    assert evaluation.class_correct == [1, 1, 1]
    assert evaluation.confusion == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    restored = RunningEvaluation(model)
    restored.restore(running.to_plain())
    assert restored.compute() == evaluation
    summed = running.compute(lambda tensor: 2 * tensor)  # as if a second process had the same counts
    assert (summed.n, summed.n_correct, summed.loss) == (8, 6, 3.0)


def test_several_objects_are_correct_as_a_set() -> None:
    torch.manual_seed(0)
    two = torchcaps.create_model("sabour2017_multimnist", classes=4)
    labels = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]])
    scores = torch.rand(4, 4)
    running = RunningEvaluation(two)
    running.update(scores, labels, 0.0)
    multi_hot = torch.nn.functional.one_hot(labels, 4).amax(1)
    evaluation = running.compute()
    assert evaluation.n_correct == int(top_k_set_match(scores, multi_hot, 2).sum())
    assert evaluation.class_counts == multi_hot.sum(0).tolist()
    assert evaluation.confusion == []


def test_any_number_of_objects_is_correct_as_a_set() -> None:
    with torch.device("meta"):
        model = torchcaps.create_model("tsai2020_diverse_vector", classes=4)
    logits = torch.randn(50, 4)
    present = (torch.rand(50, 4) < 0.5).float()
    present[:20] = (logits[:20] > 0).float()
    running = RunningEvaluation(model, n_images=50)
    running.update(logits, present, 0.0, torch.arange(50))
    evaluation = running.compute()
    expected = exact_set_match(logits.sigmoid(), present).bool()
    assert int(expected.sum()) >= 20
    assert evaluation.n_correct == int(expected.sum())
    torch.testing.assert_close(evaluation.correct, expected)
    assert evaluation.class_correct == ((logits > 0) & (present > 0)).sum(0).tolist()


def test_evaluation_changes_neither_model_nor_rng() -> None:
    model = torchcaps.create_model("choi2019_mnist", width=4, types=2, primary_dim=4, dim=4, hidden=(8,))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng_state = torch.get_rng_state()
    loader = Loader(create_dataset("digits", "test").subset(range(20)), 8)
    first = evaluate(model, loader, model.loss())
    assert first == evaluate(model, loader, model.loss())  # dropout is off
    assert first.n == 20
    assert model.training
    torch.testing.assert_close(torch.get_rng_state(), rng_state, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"val_fraction": 0.2}, ["confusion.png", "curves.png", "perturbation.png", "predictions.png"]),
        ({"reconstruction": False}, ["confusion.png", "curves.png", "predictions.png"]),
        (
            {
                "data": "multimnist",
                "data_options": {"source": "digits"},
                "n_objects": 2,
                "image": (1, 36, 36),
                "steps": 2,
                "max_test_images": 40,
            },
            ["curves.png", "predictions.png"],
        ),
    ],
    ids=["digits", "no decoder", "two objects"],
)
def test_figures_of_a_run(changes: dict[str, object], names: list[str], tmp_path: Path) -> None:
    train(small_spec(**changes), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/figures").iterdir()) == names
    for name in names:
        with Image.open(tmp_path / "run/figures" / name) as figure:
            assert min(figure.size) > 200
            assert len(figure.convert("L").resize((64, 64)).getcolors(4096)) > 10  # not blank
