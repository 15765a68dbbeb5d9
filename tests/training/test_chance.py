"""Report of a run at chance, and the class-weighted loss."""

from pathlib import Path

import pytest
import torch

import torchcaps
from tests.training.helpers import small_spec
from torchcaps.data import create_dataset
from torchcaps.models import Output
from torchcaps.models.recipe import OptimizerConfig, Recipe
from torchcaps.training import train
from torchcaps.training.chance import describe_chance, describe_overfitting, is_at_chance
from torchcaps.training.evaluation import BalancedLoss, Evaluation


def test_a_run_at_chance_is_reported_once_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_spec(epochs=3, optimizer=OptimizerConfig("sgd", 1e-9)), tmp_path / "run")
    text = capsys.readouterr().out
    assert text.count("not above chance") == 1
    for reason in ("learning rate", "labels"):
        assert reason in text


@pytest.mark.parametrize(
    ("counts", "n_correct", "expected"),
    [([50, 50], 52, True), ([50, 50], 80, False), ([90, 10], 90, True), ([5, 5], 5, False), ([90, 10], 99, False)],
)
def test_chance_is_the_most_frequent_class(counts: list[int], n_correct: int, expected: bool) -> None:
    assert is_at_chance(Evaluation(sum(counts), n_correct, 1.0, counts, [0, 0])) is expected


def test_likely_reasons() -> None:
    """Dead capsules, constant scores, a single predicted class, and the gradient norm."""
    model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    dataset = create_dataset("digits", "test").subset(range(20))
    batch = dataset.get_batch(torch.arange(20))._replace(images=torch.rand(20, 1, 28, 28))
    counts, right = [2] * 10, [0] * 10
    confusion = [[2] + [0] * 9 for _ in range(10)]

    def reasons(grad_norm: float = 1.0) -> str:
        result = Evaluation(20, 2, 1.0, counts, right, confusion)
        return "\n".join(describe_chance(result, model, batch, dataset, Recipe(), grad_norm))

    assert "--lr 0.01" in reasons(1e-9)
    assert "--max-grad-norm" in reasons(1e6)
    assert model.training
    with torch.no_grad():
        for parameter in model.capsules.parameters():
            parameter.zero_()
    assert "100 % of the class capsules" in reasons()
    plain = torchcaps.create_model("cnn_images", image=(1, 28, 28), channels=(4, 4))
    model = plain
    with torch.no_grad():
        plain.front[-1].weight.zero_()
    assert "same for all images" in reasons()
    with torch.no_grad():
        plain.front[-1].weight.normal_()
    assert "'0'" in reasons()
    counts = [0, 20] + [0] * 8
    assert reasons().count("\n") == 0
    assert "label '1'" in reasons()


def test_images_that_are_not_learned_from_others_are_reported_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bright and dark images, whose labels are exchanged in the validation set."""
    labels = torch.arange(24) % 2
    images = 0.9 * labels.float().view(-1, 1, 1, 1).expand(24, 1, 20, 20)
    options = {"channels": (4, 4), "batch_size": 8, "epochs": 6, "lr": 0.02, "num_threads": 1}
    data = (images, labels), (images, 1 - labels)
    run = torchcaps.fit("cnn_images", *data, out=tmp_path / "run", quiet=True, figures=False, **options)
    assert run.history["train_accuracy"][-1] == 1
    text = capsys.readouterr().err
    assert text.count("warning") == 1
    assert "the val accuracy of " in text
    assert "is not above chance (50.0 %), although the training accuracy is 100.0 %" in text


def test_reasons_of_images_that_are_not_learned() -> None:
    """Batch normalisation after few steps, otherwise overfitting; too few images only if there are some correct."""
    plain, deep = (torchcaps.create_model(name) for name in ("capsnet_small", "capsnet_images"))
    train, none = Evaluation(40, 40, 1.0, [20, 20], [20, 20]), Evaluation(20, 10, 1.0, [10, 10], [10, 0])

    def reasons(network: torch.nn.Module, n_steps: int, result: Evaluation = none) -> str:
        return "\n".join(describe_overfitting(train, result, "val", network, n_steps))

    assert "batch normalisation needs about 50" in reasons(deep, 12)
    assert "overfitting" in reasons(deep, 60)
    assert "overfitting" in reasons(plain, 12)
    assert "few images" not in reasons(plain, 12)
    assert "few images" in reasons(plain, 12, Evaluation(20, 11, 1.0, [10, 10], [10, 1]))


def test_balanced_loss_gives_every_class_the_same_weight() -> None:
    """Equal to the mean over classes of the mean loss of their images, on the training set."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 3])
    logits = torch.randn(8, 4, requires_grad=True)
    loss = torchcaps.create_model("cnn_images", classes=4, channels=(4,)).loss("none")
    balanced = BalancedLoss(loss, labels, 4)(Output(logits), labels)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = torch.stack([losses[labels == c].mean() for c in (0, 1, 3)]).mean()
    torch.testing.assert_close(balanced, expected)
    first, second = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (balanced, expected))
    torch.testing.assert_close(first, second)
