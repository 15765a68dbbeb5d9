"""Outputs of the models: scores, class capsules, reconstructions and traces."""

import pytest
import torch

from tests.models.narrow import CAPSULE_MODELS, EVERY, batch, is_approximate, narrow
from tests.tolerances import STREAMED, assert_different, assert_equal, relative_rms
from torchcaps import create_model
from torchcaps.capsules import Capsules
from torchcaps.models import CapsuleNetwork, ConvNetwork, Objective, Output
from torchcaps.models.registry import MODELS
from torchcaps.routing import EM, Attention, InvertedAttention

RECONSTRUCTING = [name for name in CAPSULE_MODELS if MODELS.get(name).spec.reconstruction]  # type: ignore[attr-defined]


@EVERY
def test_output_shapes(name: str) -> None:
    model = narrow(name).eval()
    for n_images in (1, 3):
        output = model(batch(model, n_images)[0])
        assert isinstance(output, Output)
        assert output.scores.shape == (n_images, model.spec.classes)
        assert output.trace is None
        assert isinstance(model, CapsuleNetwork if name in CAPSULE_MODELS else ConvNetwork)
        assert isinstance(model.loss(), Objective)
        if name not in CAPSULE_MODELS:
            assert output.capsules is None
            continue
        assert isinstance(output.capsules, Capsules)
        assert output.capsules.pose.shape[:2] == (n_images, model.spec.classes)
        if output.reconstruction is not None:
            objects = () if model.n_objects == 1 else (model.n_objects,)
            assert output.reconstruction.shape == (n_images, *objects, *model.spec.image)
        else:
            assert not model.spec.reconstruction  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CAPSULE_MODELS)
def test_scores_are_those_of_the_head(name: str) -> None:
    model = narrow(name).eval()
    with torch.no_grad():
        output = model(batch(model, 3)[0])
    head = model.spec.head  # type: ignore[attr-defined]
    if head == "length":
        assert_equal(output.scores, output.capsules.length())
    elif head == "normalized":
        assert_equal(output.scores, output.capsules.length(normalized=True))
    elif head == "activation":
        assert output.scores is output.capsules.activation
    elif head == "log_activation":
        total = output.capsules.activation.sum(-1, keepdim=True)
        torch.testing.assert_close(output.scores.exp(), output.capsules.activation / total)
    else:
        assert_equal(output.scores, model.head.linear(output.capsules.pose)[..., 0])
    if head not in ("linear", "log_activation"):
        assert float(output.scores.min()) >= 0
        assert float(output.scores.max()) < 1


@pytest.mark.parametrize("name", CAPSULE_MODELS)
def test_trace_has_every_layer_and_iteration(name: str) -> None:
    # a fixed point that is not reached amplifies the rounding of streamed votes: store them
    model = narrow(name, **({"streamed": False} if is_approximate(name) else {})).eval()
    images = batch(model, 2)[0]
    output = model(images, trace=True)
    layers = list(model.capsules.layers.values())
    assert len(output.trace) == len(layers)
    for layer, trace in zip(layers, output.trace, strict=True):
        assert len(trace.couplings) == layer.routing.iterations
        for coupling in trace.couplings:
            assert coupling.shape[0] == 2
            assert coupling.shape[-1] == layer.geometry.parents
    # without a trace the couplings are not stored: another computation of the same values
    assert relative_rms(output.scores, model(images).scores) < STREAMED[torch.float32]


@pytest.mark.parametrize("name", RECONSTRUCTING)
def test_labels_are_decoded_in_training_and_predictions_in_evaluation(name: str) -> None:
    model = narrow(name, **({"routing": Attention(dropout=0)} if name.startswith("choi") else {}))
    images, labels, _ = batch(model, 4)
    other = (labels + 1) % model.spec.classes
    trained, changed = model(images, labels), model(images, other)
    assert_equal(trained.scores, changed.scores)
    assert_different(trained.reconstruction, changed.reconstruction)
    assert_equal(trained.reconstruction, model.decode(trained.capsules, labels))
    model.eval()
    by_label, alone = model(images, labels), model(images)
    if model.n_objects == 1:
        assert_equal(by_label.reconstruction, alone.reconstruction)
    assert_equal(alone.reconstruction, model.decode(alone.capsules))
    count = model.n_objects
    best = alone.scores.argmax(1) if count == 1 else alone.scores.topk(count, dim=1).indices
    assert_equal(alone.reconstruction, model.decode(alone.capsules, best))


def test_multimnist_decodes_each_digit_separately() -> None:
    model = narrow("sabour2017_multimnist")
    images, labels, targets = batch(model, 4)
    output = model(images, labels)
    assert_equal(model.decode(output, labels), output.reconstruction)
    for k in range(2):
        torch.testing.assert_close(output.reconstruction[:, k], model.decode(output.capsules, labels[:, k]))
    hot = torch.nn.functional.one_hot(labels, 10).amax(1)
    rising = model(images, labels.sort(1).values)
    assert_equal(model(images, hot).reconstruction, rising.reconstruction)
    value = model.loss()(output, labels, targets)
    torch.testing.assert_close(model.loss()(output, hot, targets), value)
    assert_different(model.loss()(output, labels, targets.flip(1)), value)  # each has its own target


def test_predicted_digits_are_decoded_in_the_order_of_the_labels() -> None:
    """In evaluation each correct prediction has the position of its label, so that it is compared with its target."""
    model = narrow("sabour2017_multimnist").eval()
    images, _, _ = batch(model, 4)
    alone = model(images)
    first, second = alone.scores.topk(2, dim=1).indices.unbind(1)
    wrong = (first.maximum(second) + 1) % 10
    wrong = torch.where((wrong == first) | (wrong == second), (wrong + 1) % 10, wrong)
    wrong = torch.where((wrong == first) | (wrong == second), (wrong + 1) % 10, wrong)
    for labels, decoded in (
        ((second, first), (second, first)),
        ((first, second), (first, second)),
        ((wrong, first), (second, first)),
        ((second, wrong), (second, first)),
    ):
        found = model(images, torch.stack(labels, dim=1)).reconstruction
        assert_equal(found, model.decode(alone.capsules, torch.stack(decoded, dim=1)))


@pytest.mark.parametrize(
    "routing", ["uniform", "dynamic", "em", "inverted_attention", "attention", "trainable", "quadratic"]
)
@pytest.mark.parametrize(
    "name", ["sabour2017_mnist", "choi2019_mnist", "tsai2020_cifar10", "chen2019_multi_cifar10", "hinton2018_smallnorb"]
)
def test_head_and_loss_follow_the_routing(name: str, routing: str) -> None:
    """Every routing works in every architecture, with a head and a loss that fit it."""
    changes = {"dim": 8, "types": 2, "primary_dim": 2} if name == "sabour2017_mnist" and routing == "attention" else {}
    model = narrow(name, routing=routing, **changes)
    images, labels, targets = batch(model, 2)
    model.loss()(model(images, labels), labels, targets).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    scores = model.eval()(images).scores.detach()
    if routing == "inverted_attention":
        assert model.recipe.loss.name == "cross_entropy"
    else:
        assert model.recipe.loss.name == ("spread" if routing == "em" else "margin")
        assert float(scores.min()) >= 0
        assert float(scores.max()) <= 1


def test_models_with_other_image_classes_and_routing() -> None:
    model = create_model("sabour2017_mnist", image=(3, 40, 40), classes=7, routing=EM(2), reconstruction=False)
    output = model(torch.rand(2, 3, 40, 40))
    assert output.scores.shape == (2, 7)
    assert_equal(output.scores, output.capsules.activation)
    assert output.reconstruction is None
    assert create_model("tsai2020_cifar10", routing=InvertedAttention(1, activations=True), width=8, types=4)(
        torch.rand(1, 3, 32, 32)
    ).scores.shape == (1, 10)
