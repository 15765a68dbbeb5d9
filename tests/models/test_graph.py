"""Models compiled, exported, in channels-last format, in half precision, copied and saved."""

import copy
import io
import pickle

import pytest
import torch

import torchcaps
from tests.models.narrow import (
    CAPSULE_MODELS,
    EVERY,
    GRAPH_KEYS,
    STRUCTURES,
    batch,
    is_approximate,
    narrow,
    narrow_graph,
    paper,
    without_expensive,
)
from tests.sampling import covering_sample
from tests.tolerances import HALF, SAME, assert_different, assert_equal, assert_finite, relative_rms
from torchcaps import list_models
from torchcaps.models import Output

SOME_STRUCTURES = pytest.mark.parametrize("name", covering_sample(without_expensive(STRUCTURES), 4, GRAPH_KEYS))
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MODELS_IN_HALF = covering_sample(
    [(name, half) for name in list_models() for half in HALVES], 30, [lambda case: case[0]]
)
BATCH = torch.export.Dim("batch", min=1, max=64)


def test_structures_cover_all_papers() -> None:
    assert {paper(name) for name in torchcaps.list_models()} - {paper(name) for name in STRUCTURES} == set()


@SOME_STRUCTURES
def test_compile_to_a_single_graph(name: str) -> None:
    torch.compiler.reset()
    model = narrow(name).eval()
    images = batch(model, 3)[0]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if is_approximate(name):  # a graph has a fixed number of solver steps
        assert_finite(compiled(images).scores)
        return
    assert relative_rms(compiled(images).scores, model(images).scores) < SAME[torch.float32]


@SOME_STRUCTURES
def test_export_with_dynamic_batch_size(name: str) -> None:
    model = narrow_graph(name).eval()
    program = torch.export.export(model, (batch(model, 3)[0],), dynamic_shapes={"images": {0: BATCH}})
    for n_images in (1, 5):
        images = batch(model, n_images)[0]
        found, expected = program.module()(images), model(images)
        assert relative_rms(found.scores, expected.scores) < SAME[torch.float32]
        if expected.reconstruction is not None:
            assert relative_rms(found.reconstruction, expected.reconstruction) < SAME[torch.float32]


def test_save_and_load_an_exported_model() -> None:
    model = narrow("capsnet_small").eval()
    program = torch.export.export(model, (batch(model, 3)[0],), dynamic_shapes={"images": {0: BATCH}})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    images = batch(model, 2)[0]
    found = torch.export.load(file).module()(images)
    assert isinstance(found, Output)
    assert relative_rms(found.scores, model(images).scores) < SAME[torch.float32]


@pytest.mark.parametrize("name", ["sabour2017_mnist", "tsai2020_resnet_cifar10"])
def test_compiled_training_step(name: str) -> None:
    torch.compiler.reset()
    model = narrow(name).double()
    images, labels, _ = batch(model, 3)
    images = images.double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        model.loss()(run(images, labels), labels, images).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert relative_rms(gradients[1], gradients[0]) < SAME[torch.float64]


@EVERY
def test_channels_last_gives_equal_outputs(name: str) -> None:
    model = narrow(name).double().eval()
    images = batch(model, 3)[0].double()
    expected = model(images)
    found = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert relative_rms(found.scores, expected.scores) < SAME[torch.float64]
    if expected.reconstruction is not None:
        assert relative_rms(found.reconstruction, expected.reconstruction) < SAME[torch.float64]


@pytest.mark.parametrize(("name", "half"), MODELS_IN_HALF)
def test_half_precision(name: str, half: str) -> None:
    """Completely in half precision, and under autocast with the routing in float32."""
    dtype = HALVES[half]
    model = narrow(name)
    images, labels, targets = batch(model, 3)
    expected = model.eval()(images).scores
    with torch.autocast("cpu", dtype):
        mixed = model(images).scores.float()
    assert relative_rms(mixed, expected) < HALF
    model.train()
    with torch.autocast("cpu", dtype):
        output = model(images, labels)
    output = output._replace(scores=output.scores.float())
    if output.reconstruction is not None:
        output = output._replace(reconstruction=output.reconstruction.float())
    model.loss()(output, labels, targets).backward()
    for key, parameter in model.named_parameters():
        assert_finite(parameter.grad, key)
    halved = copy.deepcopy(model).eval().to(dtype)(images).scores
    assert halved.dtype == dtype
    assert_finite(halved)


@pytest.mark.parametrize("name", CAPSULE_MODELS[::4])
def test_copies_and_loaded_weights_give_equal_outputs(name: str) -> None:
    model = narrow(name).eval()
    images = batch(model, 2)[0]
    expected = model(images).scores
    assert_equal(copy.deepcopy(model)(images).scores, expected)
    assert_equal(pickle.loads(pickle.dumps(model))(images).scores, expected)
    torch.manual_seed(5)
    other = model.spec.build().eval()
    assert_different(other(images).scores, expected)
    other.load_state_dict(model.state_dict())
    assert_equal(other(images).scores, expected)


@EVERY
def test_forward_writes_nothing_but_batch_statistics(name: str) -> None:
    model = narrow(name).eval()
    images, labels, _ = batch(model, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {id(module): set(vars(module)) for module in model.modules()}
    model(images, labels, trace=True)
    for key, value in model.state_dict().items():
        assert_equal(value, before[key])
    assert {id(module): set(vars(module)) for module in model.modules()} == attributes
