"""torch.func: vmap over inputs, per-sample gradients, forward mode and Jacobians equal plain autograd."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap

import torchcaps
from tests.contract.cases import CASES, DEFAULT_CASES, Case, differentiable
from tests.sampling import all_cases, covering_sample
from tests.tolerances import STREAMED, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.models.registry import find_model
from torchcaps.nn.layers import CapsuleLayer

CLOSE = STREAMED[torch.float64]
OPTIONS: tuple[bool | str, ...] = (False, True, "auto")
ROWS = covering_sample(
    itertools.product(CASES if all_cases() else DEFAULT_CASES, OPTIONS),
    0,
    [lambda row: (row[0].name, row[1]), lambda row: (row[0].geometry, row[0].pose, row[1])],
)
ONE_EACH = covering_sample(DEFAULT_CASES, 0, ["name", lambda case: (case.geometry, case.pose)])
SAMPLED = pytest.mark.parametrize(("case", "streamed"), ROWS, ids=[f"{case.id}-{option}" for case, option in ROWS])


def layer_of(case: Case, streamed: bool | str) -> CapsuleLayer:
    return case.layer(streamed)  # type: ignore[arg-type]


def total(parents: Capsules) -> Tensor:
    """Return a nonlinear function of all parents."""
    return parents.pose.sin().sum() + (0 if parents.activation is None else parents.activation.square().sum())


@SAMPLED
def test_vmap_and_per_sample_gradients(case: Case, streamed: bool | str) -> None:
    layer, children = layer_of(case, streamed), case.children()
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], *image: Tensor) -> Tensor:
        return total(functional_call(layer, parameters, (Capsules(*(x.unsqueeze(0) for x in image)),)))

    found = vmap(lambda *image: layer(Capsules(*(x.unsqueeze(0) for x in image))).pose[0])(*children)
    stored = layer_of(case, False)
    assert relative_rms(found, stored(children).pose) < CLOSE
    by_parameter, *by_child = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(None, 0, 0))(parameters, *children)
    gradients = {"children.pose": by_child[0], "children.activation": by_child[1], **by_parameter}
    for n in range(len(children.pose)):
        image = Capsules(*(x[n : n + 1].clone().requires_grad_() for x in children))  # type: ignore[union-attr]
        named = differentiable(stored, image)
        expected = torch.autograd.grad(total(stored(image)), list(named.values()), allow_unused=True)
        for (name, leaf), gradient in zip(named.items(), expected, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            found = gradients[name][n].view_as(gradient)
            assert relative_rms(found, gradient) < CLOSE, f"gradient of {name} of image {n}"


@pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.id)
def test_forward_mode_is_the_adjoint_of_backward(case: Case) -> None:
    """``<u, J v> = <J' u, v>`` with streamed votes, and by ``torch.autograd.forward_ad`` as well."""
    layer, children = layer_of(case, True), case.children()

    def run(pose: Tensor) -> Tensor:
        return layer(Capsules(pose, children.activation)).pose

    v = torch.randn_like(children.pose)
    _, tangent = jvp(run, (children.pose,), (v,))
    u = torch.randn_like(tangent)
    pose = children.pose.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(pose), pose, u)
    if getattr(layer.routing, "gradient", "full") == "full":
        torch.testing.assert_close((u * tangent).sum(), (gradient * v).sum(), rtol=1e-9, atol=1e-12)
    with torch.autograd.forward_ad.dual_level():
        dual = run(torch.autograd.forward_ad.make_dual(children.pose, v))
        assert relative_rms(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent) < CLOSE


@pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.id)
def test_jacobians_of_streamed_votes(case: Case) -> None:
    """`jacrev` runs the backward of streamed reductions inside vmap."""
    children = case.children(batch=1)
    results = []
    for streamed in (True, False):
        layer = layer_of(case, streamed)
        parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

        def run(parameters: dict[str, Tensor], pose: Tensor, layer: CapsuleLayer = layer) -> Tensor:
            return functional_call(layer, parameters, (Capsules(pose, children.activation),)).pose[0, ..., 0, :2]

        by_parameter, by_pose = jacrev(run, (0, 1))(parameters, children.pose)
        results.append([by_pose, *by_parameter.values()])
    for found, expected in zip(*results, strict=True):
        assert relative_rms(found, expected) < CLOSE


@pytest.mark.parametrize("name", ["capsnet_small", "sabour2017_multimnist", "hinton2018_smallnorb", "tsai2020_cifar10"])
def test_per_sample_gradients_of_models(name: str) -> None:
    """The whole objective, with labels and targets inside vmap, equals one backward pass per image."""
    model = torchcaps.create_model(name, **find_model(name).spec.smoke_changes()).double().eval()
    images = torch.rand(2, *model.spec.image, dtype=torch.float64)
    labels, targets = torch.tensor([1, 0]), images
    if model.n_objects == 2:
        labels, targets = torch.tensor([[1, 0], [2, 3]]), torch.rand(2, 2, *model.spec.image, dtype=torch.float64)
    objective = model.loss()

    def loss(parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        image, label, target = (x.unsqueeze(0) for x in batch)
        return objective(functional_call(model, parameters, (image, label)), label, target)

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, images, labels, targets)
    for n in range(2):
        model.zero_grad()
        batch = images[n : n + 1], labels[n : n + 1], targets[n : n + 1]
        objective(model(*batch[:2]), *batch[1:]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name][n], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("case", ONE_EACH[:2], ids=str)
def test_compiled_vmap_of_streamed_votes(case: Case) -> None:
    """Inside vmap votes are stored, also while torch.compile traces; outside of it the same layer streams again."""
    layer, children = layer_of(case, True), case.children()

    def pose_of(*image: Tensor) -> Tensor:
        return layer(Capsules(*(x.unsqueeze(0) for x in image))).pose[0]

    torch.compiler.reset()
    compiled = torch.compile(vmap(pose_of), backend="aot_eager", fullgraph=True)
    assert relative_rms(compiled(*children), layer_of(case, False)(children).pose) < CLOSE
