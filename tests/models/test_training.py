"""Training of the models: gradients, decreasing loss, overfitting of eight images, initial lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import CAPSULE_MODELS, batch, narrow, sample_models
from tests.sampling import covering_sample
from tests.tolerances import assert_equal, assert_finite
from torchcaps import create_model, list_models
from torchcaps._core.labels import split_labels
from torchcaps.models import Network, NormalizedConvCapsules
from torchcaps.models.registry import MODELS
from torchcaps.nn import DenseCapsules
from torchcaps.routing import EM, Dynamic, HeinsenEM, InvertedAttention, Quadratic, Routing

FULL_SIZE_CASES = [(name, preset) for name in CAPSULE_MODELS for preset in MODELS.get(name).spec.presets]


def head_and_preset(case: tuple[str, str]) -> tuple[str, str, str]:
    spec: Any = MODELS.get(case[0]).spec
    return type(spec.effective_routing).__name__, spec.head, case[1]


def all_correct(model: Network, images: Tensor, labels: Tensor) -> bool:
    """Return whether every image is classified correctly in evaluation mode."""
    model.eval()
    with torch.no_grad():
        correct = model.is_correct(model(images), labels)
    model.train()
    return bool(correct.all())


def check_gradients(model: Network) -> None:
    """Check that every parameter has a finite gradient that is not 0, except for biases without influence."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in gradients.items():
        assert_finite(gradient, name)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    zero = {name for name, gradient in gradients.items() if float(gradient.abs().max()) < 1e-12 * largest}  # type: ignore[union-attr]
    idle = set()
    if model.recipe.loss.name == "cross_entropy":
        idle |= {"head.linear.bias", "merge.norm.shift"}  # equal for all classes: the softmax cancels them
    below = [n for n, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    idle |= {f"{name.removesuffix('_norm')}.bias" for name in below}  # batch normalisation subtracts it
    for name, module in model.named_modules():
        if isinstance(module, NormalizedConvCapsules):  # a constant of each type, which batch normalisation subtracts
            idle |= {f"{name}.coefficients.beta_a", f"{name}.coefficients.beta_u"}
    assert zero - idle == set()


def leave_zero_scores(model: Network) -> None:
    """Set costs that start at 0 to other values: with `HeinsenEM` only they have gradients as long as scores are 0."""
    for module in model.modules():
        if isinstance(module, DenseCapsules) and isinstance(module.routing, HeinsenEM):
            for parameter in module.coefficients.parameters():
                nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize("name", sample_models(list_models(), 24))
def test_loss_decreases_and_every_parameter_has_a_gradient(name: str) -> None:
    model = narrow(name).double()
    leave_zero_scores(model)
    images, labels, targets = batch(model, 4)
    images, targets = images.double(), targets.double()
    loss = model.loss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4 if name.startswith("yang") else 1e-3)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        torch.manual_seed(1)  # equal dropout masks at every step
        value = loss(model(images, labels), labels, targets)
        value.backward()
        if step == 0:
            check_gradients(model)
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("name", sample_models(CAPSULE_MODELS, 8))
def test_models_overfit_eight_images(name: str) -> None:
    model = narrow(name)
    images, labels, targets = batch(model, 8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.momentum:
            module.momentum = max(
                module.momentum, 0.1
            )  # with 0.01 the averages lag hundreds of steps behind the weights
    loss, optimizer = model.loss(), torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(200):
        optimizer.zero_grad()
        loss(model(images, labels), labels, targets).backward()
        optimizer.step()
        if step % 5 == 4 and all_correct(model, images, labels):
            return
    pytest.fail(f"{name} does not classify 8 images correctly after 200 steps")


@pytest.mark.parametrize(("name", "preset"), covering_sample(FULL_SIZE_CASES, 12, [head_and_preset]))
def test_initial_class_capsules_are_not_saturated(name: str, preset: str) -> None:
    """At full width and in training mode: squashed lengths have no slope at 0 and 1, so they start in between.

    The logits of a linear head neither start equal, since gradients would vanish, nor decided.
    """
    torch.manual_seed(0)
    model = create_model(name, preset=preset)
    with torch.no_grad():
        output = model(batch(model, 2)[0])
    head, routing = model.spec.head, model.spec.effective_routing  # type: ignore[attr-defined]
    scores = output.scores
    if isinstance(routing, Dynamic | Quadratic):
        assert 0.02 < float(output.capsules.length().mean()) < 0.5, preset
    if head == "linear":
        assert 0.05 < float(scores.std()) < 3, preset
    elif head == "activation" and model.recipe.loss.name != "cross_entropy":  # in 0..1, not logits
        assert 0.05 < float(scores.mean()) < 0.99, preset
    elif head == "normalized":  # exp_squash and tanh have a slope of 1 at 0
        assert 0.001 < float(scores.mean()) < 0.5, preset


def initial_logit_spread(**changes: Any) -> float:
    """Return the standard deviation of the initial logits of a network with dynamic routing."""
    torch.manual_seed(0)
    model = create_model("tsai2020_diverse_dynamic", width=64, types=4, dim=16, **changes)
    with torch.no_grad():
        return float(model(batch(model, 8)[0]).scores.std())


def test_a_linear_head_on_squashed_capsules_starts_with_equal_logits() -> None:
    """The reason why dynamic routing is trained with lengths and the margin loss; the linear head is a control."""
    assert initial_logit_spread(classifier="linear", routing=InvertedAttention(2)) > 0.05
    assert initial_logit_spread(classifier="linear") < 0.02


@pytest.mark.parametrize(
    ("classifier", "routing", "head", "loss"),
    [
        ("auto", Dynamic(2), "length", "margin"),
        ("auto", InvertedAttention(2), "linear", "binary"),
        ("auto", EM(2), "activation", "margin"),
        ("linear", Dynamic(2), "linear", "binary"),
        ("sigmoid", InvertedAttention(2), "sigmoid", "margin"),
    ],
)
def test_classifier_of_overlapping_digits(classifier: str, routing: Routing, head: str, loss: str) -> None:
    model = narrow("tsai2020_diverse_matrix", routing=routing, classifier=classifier)
    images, labels, _ = batch(model, 4)
    output = model(images)
    model.loss()(output, labels).backward()
    assert (model.spec.head, model.recipe.loss.name) == (head, loss)  # type: ignore[attr-defined]
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == set()
    if head == "linear":
        assert_equal(output.scores, model.head.linear(output.capsules.pose).squeeze(-1))
    elif head == "sigmoid":
        assert_equal(output.scores, model.head.linear(output.capsules.pose).squeeze(-1).sigmoid())
    elif head == "length":
        assert_equal(output.scores, output.capsules.length())


def test_ascent_changes_only_the_coefficients() -> None:
    model = narrow("yang2021_mnist", penalty="l1")
    images, labels, _ = batch(model, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Quadratic.ascend(model, images, labels)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"capsules.layers.classes.coefficients.coefficient"}
    assert model.spec.effective_routing.penalty == "l1"  # type: ignore[attr-defined]


def test_ascent_accepts_indices_and_multi_hot_labels() -> None:
    results = []
    for as_numbers in (True, False):
        model = narrow("yang2021_multimnist")
        images, labels, _ = batch(model, 4)
        given = labels if as_numbers else split_labels(labels, 10, 2)[1]
        Quadratic.ascend(model, images, given)
        results.append(model.capsules.layers["classes"].coefficients["coefficient"])
    assert_equal(*results)
