"""Attacks: equal to foolbox and to closed forms, and in the scale of the images."""

import dataclasses
import functools
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, assert_different, largest_difference, relative_rms
from torchcaps.analysis.adversarial import AttackResult, attack, draw_attack
from torchcaps.analysis.attacks import bim, fgsm, frozen, pgd
from torchcaps.analysis.common import evaluate_predictions, multi_hot_labels
from torchcaps.models import Network

EPS = 8 / 255


@pytest.fixture(scope="module")
def foolbox() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports names that scipy has moved
        return pytest.importorskip("foolbox")


class Logits(nn.Module):
    """A module that returns logits, as foolbox takes it."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).scores


def interior_images(model: Network, n_images: int = 8) -> tuple[Tensor, Tensor]:
    """Images that an attack can change by EPS in both directions, in float64."""
    images, labels, _ = batch(model, n_images)
    return 0.1 + 0.8 * images.double(), labels


@pytest.mark.parametrize("name", ["chen2019_lenet", "chen2019_fc_mnist", "capsnet_small"])
def test_fgsm_equals_foolbox(foolbox: ModuleType, name: str) -> None:
    model = narrow(name).double().eval()
    images, labels, _ = batch(model)
    images = images.double()
    other = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    oracle = foolbox.PyTorchModel(Logits(model).eval(), bounds=(0, 1), device="cpu")
    _, expected, _ = other(oracle, images, labels, epsilons=EPS)
    assert largest_difference(fgsm(model, images, labels), expected) < EXACT


def test_bim_and_pgd_equal_foolbox(foolbox: ModuleType) -> None:
    """Without a random start, which has its own test."""
    model = narrow("chen2019_lenet").double().eval()
    images, labels, _ = batch(model)
    images = images.double()
    oracle = foolbox.PyTorchModel(Logits(model).eval(), bounds=(0, 1), device="cpu")
    basic = foolbox.attacks.LinfBasicIterativeAttack(abs_stepsize=0.01, steps=7, random_start=False)
    projected = foolbox.attacks.LinfProjectedGradientDescentAttack(abs_stepsize=0.02, steps=4, random_start=False)
    for other, size, steps in ((basic, 0.01, 7), (projected, 0.02, 4)):
        _, expected, _ = other(oracle, images, labels, epsilons=EPS)
        assert largest_difference(bim(model, images, labels, EPS, steps, size), expected) < EXACT


def linear_model() -> Network:
    """A model with one linear layer from images to logits."""
    model = narrow("chen2019_lenet", image=(1, 16, 16), classes=3).double()
    torch.manual_seed(1)
    model.front = nn.Sequential(nn.Flatten(), nn.Linear(256, 3).double())
    return model


def test_fgsm_of_a_linear_classifier_has_a_closed_form() -> None:
    model = linear_model()
    images, labels = 0.2 + 0.6 * torch.rand(5, 1, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    linear = model.front[1]
    with torch.no_grad():
        residual = model(images).scores.softmax(1) - torch.eye(3, dtype=torch.float64)[labels]
        expected = images + 0.1 * (residual @ linear.weight).sign().reshape(images.shape)
    assert largest_difference(fgsm(model, images, labels, eps=0.1), expected) < EXACT
    ball = torch.tensor([0.1, 0.2, 0.0, 0.1, 0.1], dtype=torch.float64)[:, None, None, None]
    moved = (fgsm(model, images, labels, eps=ball) - images).abs().amax((1, 2, 3))
    assert largest_difference(moved, [0.1, 0.2, 0.0, 0.1, 0.1]) < EXACT


def test_trap_44_fgsm_changes_by_eps_in_the_scale_of_the_images() -> None:
    """8/255 for pixels in 0..1, 8 grey levels for bytes / 256, and always within the bounds."""
    model = narrow("chen2019_fc_mnist").double()
    images, labels = interior_images(model)
    result = attack(model, images, labels, eps=EPS)
    assert result.largest_change == pytest.approx(EPS, abs=EXACT)
    levels = (255 * images).round()
    changed = fgsm(model, levels / 256, labels, eps=8 / 256, high=255 / 256) * 256
    steps = (changed - levels).abs()
    assert float(steps.max()) == pytest.approx(8, abs=1e3 * EXACT)
    assert largest_difference(changed, changed.round()) < 1e3 * EXACT
    edge = torch.cat([torch.zeros_like(images[:4]), torch.full_like(images[:4], 255 / 256)])
    changed = fgsm(model, edge, labels, eps=8 / 256, high=255 / 256)
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 255 / 256


def test_trap_44_images_in_another_scale_are_rejected() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model)
    for bad in (images * 255, images - 0.5):
        with pytest.raises(ValueError, match="images"):
            fgsm(model, bad, labels)
    mean = images.mean(0)
    changed = fgsm(model, images - mean, labels, low=-mean, high=1 - mean)
    assert float((changed + mean).min()) >= -1e-6
    assert float((changed + mean).max()) <= 1 + 1e-6


def test_trap_44_a_constant_prediction_is_flagged() -> None:
    """The accuracy is then the class frequency, as the published 11.35 and 8.92 % are those of digits 1 and 5."""
    model = linear_model()
    with torch.no_grad():
        model.front[1].weight.mul_(1e-6)
        model.front[1].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    images, labels = torch.rand(10, 1, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0, 2, 0, 0])
    result = attack(model, images, labels)
    assert result.degenerate is True
    assert result.top_fraction == 1
    assert result.accuracy == 0.2
    assert result.predicted.tolist() == [0, 10, 0]
    assert result.true.tolist() == [5, 2, 3]
    assert attack(model, images, torch.ones_like(labels)).degenerate is False  # all images are of that class


def test_trap_44_varied_predictions_are_not_flagged() -> None:
    model, images, labels = overfitted_model()
    result = attack(model, images, labels, eps=0.05)
    assert result.clean_accuracy > 0.95
    assert result.accuracy < result.clean_accuracy
    assert result.degenerate is False
    assert int(result.predicted.sum()) == result.n_images == len(images)
    assert int((result.predicted > 0).sum()) > 3


@functools.cache
def overfitted_model() -> tuple[Network, Tensor, Tensor]:
    """A LeNet that fits its training images."""
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model, 20)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model.loss()(model(images), labels).backward()
        optimizer.step()
    return model, images, labels


def test_pgd_stays_within_eps_and_the_bounds_and_is_stronger_than_fgsm() -> None:
    model, images, labels = overfitted_model()
    for restarts in (1, 3):
        changed = pgd(model, images, labels, 0.05, steps=5, restarts=restarts)
        assert float((changed - images).abs().max()) <= 0.05 + 1e-6
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    points = (images, fgsm(model, images, labels, 0.05), bim(model, images, labels, 0.05))
    losses = [float(nn.functional.cross_entropy(eval_scores(model, changed), labels)) for changed in points]
    assert losses == sorted(losses)


def test_pgd_starts_uniformly_within_eps() -> None:
    """A model without gradients returns the starts: uniform in both directions, clipped to the bounds."""
    model = linear_model()
    for parameter in model.parameters():
        parameter.data.zero_()
    images, labels = torch.full((8, 1, 16, 16), 0.5, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    starts = (pgd(model, images, labels, 0.1) - images) / 0.1
    assert -1 <= float(starts.min()) < -0.99
    assert 0.99 < float(starts.max()) <= 1
    for low, high in ((-1, 0), (-0.5, 0.5)):  # standard error of a fraction of 0.5 of 2,048 values: 0.011
        assert abs(float(((starts > low) & (starts < high)).double().mean()) - 0.5) < 4 * 0.011
    assert len(starts.flatten().unique()) == starts.numel()  # each pixel has its own
    assert float(pgd(model, 0 * images, labels, 0.1).min()) == 0


def test_restarts_keep_the_smallest_margin_and_starts_depend_on_the_seed() -> None:
    model, images, labels = overfitted_model()

    def margin(changed: Tensor) -> Tensor:
        scores = eval_scores(model, changed)
        others = scores.scatter(1, labels[:, None], -torch.inf).amax(1)
        return scores.gather(1, labels[:, None])[:, 0] - others

    one, four = (pgd(model, images, labels, 0.05, steps=2, restarts=n) for n in (1, 4))
    difference = margin(four) - margin(one)
    assert float(difference.max()) <= 1e-5
    assert float(difference.min()) < -1e-4
    state = torch.get_rng_state()
    again = pgd(model, images, labels, 0.05, steps=2, batch_size=7)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    assert relative_rms(again, one) < SAME[torch.float32]
    assert_different(pgd(model, images, labels, 0.05, steps=2, seed=1), one)


def eval_scores(model: Network, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images).scores


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("capsnet_small", "training"),
        ("chen2019_conv_mnist", "cross_entropy"),
        ("hinton2018_smallnorb", "training"),
        ("tsai2020_cifar10", "training"),
        ("choi2019_mnist", "cross_entropy"),
        ("yang2021_mnist", "cross_entropy"),
        ("sabour2017_multimnist", "training"),
        ("sabour2017_multimnist", "cross_entropy"),
        ("tsai2020_diverse_matrix", "training"),
        ("tsai2020_diverse_matrix", "cross_entropy"),
    ],
)
def test_every_kind_of_model_can_be_attacked_and_is_restored(name: str, loss: str) -> None:
    model = narrow(name).train()
    images, labels, _ = batch(model, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    next(model.parameters()).requires_grad_(False)
    result = attack(model, images, labels, "bim", steps=1, loss=loss, n_examples=2)  # type: ignore[arg-type]
    assert model.training is True
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert 0 < result.largest_change <= EPS + 1e-6
    assert result.before.shape == result.after.shape == (2, *model.spec.image)
    assert result.true.tolist() == multi_hot_labels(model, labels).sum(0).tolist()
    if model.n_objects is not None:
        assert int(result.predicted.sum()) == 4 * model.n_objects


def test_the_training_loss_excludes_the_reconstruction_term() -> None:
    model = narrow("capsnet_small").double().eval()
    assert model.decoder is not None
    images, labels = interior_images(model)
    inputs = images.clone().requires_grad_()
    torchcaps.losses.MarginLoss()(model(inputs).scores, labels).backward()
    assert inputs.grad is not None
    expected = images + EPS * inputs.grad.sign()
    assert largest_difference(fgsm(model, images, labels, loss="training"), expected) < EXACT


def test_a_black_box_attack_uses_the_gradients_of_its_source() -> None:
    model, source = narrow("chen2019_fc_mnist"), narrow("chen2019_lenet")
    images, labels, _ = batch(model, 20)
    result = attack(model, images, labels, eps=0.1, source=source)
    correct, predicted = evaluate_predictions(model, fgsm(source, images, labels, 0.1), labels)
    assert result.accuracy == float(correct.double().mean())
    assert result.predicted.tolist() == predicted.sum(0).tolist()
    assert result.source == source.name
    assert attack(model, images, labels).source == ""
    with pytest.raises(ValueError, match="source"):
        attack(model, images, labels, source=narrow("tsai2020_cnn_cifar10"))


def test_batches_do_not_change_the_result_and_progress_is_called_for_each() -> None:
    model = narrow("chen2019_lenet").double()
    images, labels = interior_images(model, 10)
    calls: list[int] = []
    batched = fgsm(model, images, labels, batch_size=3, progress=lambda: calls.append(1))
    assert len(calls) == 4
    assert largest_difference(batched, fgsm(model, images, labels)) < EXACT
    with torch.no_grad():  # the attack enables gradients itself
        assert largest_difference(batched, fgsm(model, images, labels)) < EXACT


def test_frozen_gives_gradients_to_the_images_only() -> None:
    model = narrow("chen2019_lenet").train()
    images, _, _ = batch(model, 2)
    images = images.clone().requires_grad_()
    with frozen(model):
        assert model.training is False
        model(images).scores.sum().backward()
    assert images.grad is not None
    assert model.training is True
    assert {(p.requires_grad, p.grad) for p in model.parameters()} == {(True, None)}


def test_invalid_arguments_are_rejected() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model)
    for message, call in {
        "eps .*-0.1": lambda: fgsm(model, images, labels, eps=-0.1),
        "loss .*'mse'": lambda: fgsm(model, images, labels, loss="mse"),  # type: ignore
        "labels .*3": lambda: fgsm(model, images, labels[:3]),
        r"labels .*0\.\.9": lambda: fgsm(model, images, labels + 5),
        "steps .*0": lambda: bim(model, images, labels, steps=0),
        "step_size .*0": lambda: bim(model, images, labels, step_size=0.0),
        "restarts .*0": lambda: pgd(model, images, labels, restarts=0),
        "method .*'cw'": lambda: attack(model, images, labels, "cw"),  # type: ignore
        "images": lambda: attack(model, images[:0], labels[:0]),
        "results": lambda: draw_attack({}, "none.png"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="uint8"):
        fgsm(model, (images * 255).byte(), labels)


def test_figure_with_and_without_examples(tmp_path: Path) -> None:
    model, images, labels = overfitted_model()
    result = attack(model, images, labels, eps=0.1)
    assert isinstance(result, AttackResult)
    draw_attack({"LeNet": result}, tmp_path / "one.png", "FGSM")
    bare = attack(model, images, labels, n_examples=0)
    constant = dataclasses.replace(bare, degenerate=True)
    draw_attack({"LeNet, a name that is long": bare, "constant": constant}, tmp_path / "two.svg")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    assert (tmp_path / "two.svg").stat().st_size > 10_000


def test_figure_wraps_long_class_names(tmp_path: Path) -> None:
    """A long name below the bars would leave them no height."""
    model, images, labels = overfitted_model()
    result = attack(model, images, labels, eps=0.1, n_examples=0)
    assert isinstance(result, AttackResult)
    classes = [f"photograph of a very small object {n}" for n in range(len(result.predicted))]
    draw_attack({"LeNet": result}, tmp_path / "named.svg", classes=classes)
    text = (tmp_path / "named.svg").read_text()
    assert "<!-- photograph of -->" in text
    assert not any(name in text for name in classes)
