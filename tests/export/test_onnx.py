"""Export to ONNX: every routing and model agrees with onnxruntime, at two batch sizes."""

import itertools
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from tests.contract.cases import DEFAULTS, ROUTINGS, SMALL, Case, make_cases
from tests.models.narrow import batch, narrow, narrow_graph, sample_models
from tests.sampling import all_cases, covering_sample
from tests.tolerances import SAME, relative_rms
from torchcaps import list_models
from torchcaps.data import Batch, Pipeline
from torchcaps.data.geometry import CenterCrop, PadTo, RandomShift
from torchcaps.data.transforms import Normalize, ScalePixels, Standardize, SubtractMeanImage
from torchcaps.export import Exported, Metadata, Parity, ParityError, load_onnx, onnx_file, to_onnx
from torchcaps.export import program as programs
from torchcaps.export.metadata import split_preprocessing
from torchcaps.export.onnx_file import start_session
from torchcaps.export.parity import check_parity
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Equilibrium

CASES = [case for case in make_cases(ROUTINGS if all_cases() else DEFAULTS, SMALL) if not case.unsupported]
if all_cases():
    SOLVED = {f"equilibrium-{solver}": Equilibrium(max_steps=6, solver=solver) for solver in ("iteration", "anderson")}
    CASES += make_cases(SOLVED, SMALL)
CASES = [case for case in CASES if not (case.routing.residual and case.geometry == "conv_small")]
# a dense and a convolutional layer; the layers of all routings take two seconds each
SAMPLE = covering_sample(CASES, 1, [lambda case: case.geometry], seed=1)


def supported(case: Case) -> bool:
    try:
        case.layer()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("case", SAMPLE, ids=[case.id for case in SAMPLE])
def test_layer_with_trace(case: Case, tmp_path: Path) -> None:
    if not supported(case):
        return  # coordinates without a grid
    layer = case.layer(dtype=torch.float32)
    result = to_onnx(layer, tmp_path / "layer.onnx", example=case.children(torch.float32, batch=5), trace=True)
    assert isinstance(result, Exported)
    assert isinstance(result.parity, Parity)
    assert result.parity.difference < 1e-4
    assert result.parity.batch_sizes == (1, 5)
    n_couplings = sum(name.startswith("couplings_") for name in result.outputs)
    assert n_couplings == case.routing.iterations
    assert case.routing == layer.routing  # the layer itself is not changed
    assert layer.votes_factory is None


@pytest.mark.parametrize("name", sample_models(list_models(), 1) if all_cases() else ["tsai2020_cifar10"])
def test_model(name: str, tmp_path: Path) -> None:
    model = narrow_graph(name)
    result = to_onnx(model, tmp_path / "model.onnx", example=batch(model, 5)[0])
    assert result.parity.difference < 1e-4
    model.eval()
    images = batch(model, 4)[0]  # a batch size that the exporter has not seen
    exported = load_onnx(tmp_path / "model.onnx").model(images)
    expected = model(images)
    assert relative_rms(exported.scores, expected.scores) < SAME[torch.float32]
    if expected.reconstruction is not None:
        assert exported.reconstruction is not None
        assert relative_rms(exported.reconstruction, expected.reconstruction) < SAME[torch.float32]
    proto = onnx.load(tmp_path / "model.onnx")
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 20)]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param != ""
    assert not any(node.metadata_props for node in proto.graph.node)  # source locations


def test_disagreement_leaves_no_file_and_keeps_an_older_one(tmp_path: Path) -> None:
    layer, path = DenseCapsules(3, 2, 2, 2, routing="uniform"), tmp_path / "layer.onnx"
    path.write_bytes(b"older")
    with pytest.raises(ParityError):
        to_onnx(layer, path, example=torch.randn(2, 3, 2), limit=-1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["layer.onnx"]
    assert path.read_bytes() == b"older"


class Identity(torch.nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x}


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (lambda part: {"y": part["x"] + 9e-5}, True),
        (lambda part: {"y": part["x"] + 2e-4}, False),
        (lambda part: {"y": part["x"] * (1 + 9e-5)}, True),  # relative to large values
        (lambda part: {"y": part["x"] * torch.nan}, False),
        (lambda part: {"y": part["x"][:1]}, False),
        (lambda part: {}, False),
    ],
)
def test_parity(run, passes: bool) -> None:
    inputs = {"x": torch.linspace(0, 1000, 10).view(5, 2)}
    if passes:
        assert check_parity(Identity(), run, inputs).difference <= 1e-4
    else:
        with pytest.raises(ParityError):
            check_parity(Identity(), run, inputs)


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [ScalePixels(256), SubtractMeanImage(torch.full((2, 9, 9), 0.25))],
        [CenterCrop(7), Standardize()],
        [Standardize(), CenterCrop(7)],
        [PadTo(12)],
        [CenterCrop(7), Normalize((0.1, 0.2), (0.5, 0.7)), PadTo(10)],
        [PadTo(10), Normalize((0.1, 0.2), (0.5, 0.7))],
    ],
    ids=str,
)
def test_preprocessing_of_metadata_and_graph_equals_the_pipeline(transforms: list) -> None:
    pipeline = Pipeline(test=transforms)
    pixels = torch.randint(256, (4, 2, 9, 9), dtype=torch.uint8)
    pixels[0] = 7  # constant
    labels = torch.zeros(4, dtype=torch.int64)
    expected = pipeline(Batch(pixels, labels, pixels, labels), train=False).images
    scale, normalize, rest = split_preprocessing(pipeline)
    images = pixels / scale.scale
    if normalize is not None:
        mean, std = (torch.tensor(x)[:, None, None] for x in (normalize.mean, normalize.std))
        images = (images - mean) / std
    found = programs.Program(narrow("capsnet_small"), transforms=rest).transforms(images)
    assert relative_rms(found, expected) < SAME[torch.float32]


def test_invalid_arguments(tmp_path: Path) -> None:
    path, layer = tmp_path / "x.onnx", DenseCapsules(3, 2, 2, 2, routing="uniform")
    with pytest.raises(TypeError, match="model"):
        to_onnx(torch.nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match="example"):
        to_onnx(layer, path)
    with pytest.raises(ValueError, match="decoder"):
        to_onnx(layer, path, example=torch.randn(2, 3, 2), decoder="above")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RandomShift"):
        programs.Program(narrow("capsnet_small"), transforms=[RandomShift(2)])
    assert not path.exists()


def test_metadata_round_trip() -> None:
    metadata = Metadata.of(narrow("tsai2020_cifar10"), classes=tuple("abcdefghij"), mean=(0.1, 0.2, 0.3))
    assert Metadata.from_text(metadata.to_text()) == metadata
    assert metadata.probabilities == "softmax"
    assert Metadata.of(narrow("capsnet_small")).probabilities == "identity"


class Solve(torch.nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        matrix = x @ x.transpose(1, 2) + 1e-2 * torch.eye(4)
        return {"y": torch.linalg.solve_ex(matrix, torch.ones_like(matrix[:, :, :1]))[0]}


def test_linear_equations_of_anderson_acceleration() -> None:
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))  # singular without the diagonal
    _, parity = onnx_file._export(Solve(), {"x": x}, Solve()(x), {}, limit=1e-4)
    assert parity.difference < 1e-4


class Digamma(torch.nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.digamma()}


def test_digamma_of_positive_values() -> None:
    x = torch.cat([torch.linspace(0.05, 3, 45), torch.logspace(0.5, 4, 30)]).view(5, 15)
    _, parity = onnx_file._export(Digamma(), {"x": x}, {"y": x}, {}, limit=2e-6)
    assert parity.difference < 2e-6


def test_stable_sort_and_the_decoder_of_several_objects(tmp_path: Path) -> None:
    """Of equal scores the lower class index wins, also in ONNX."""
    if not all_cases():
        return
    model = narrow("sabour2017_multimnist").eval()
    with torch.no_grad():
        for parameter in model.front.parameters():
            parameter.zero_()  # all scores are equal
    result = to_onnx(model, tmp_path / "model.onnx", decoder="beside")
    assert result.decoder is not None
    session = start_session(result.decoder.read_bytes())
    pairs = torch.tensor(list(itertools.islice(itertools.permutations(range(10), 2), 7)))
    capsules = torch.randn(7, 10, model.spec.dim)  # type: ignore[attr-defined]
    found = session({"capsules": capsules, "labels": pairs})["reconstruction"]
    assert relative_rms(found, model.decode(capsules, pairs)) < SAME[torch.float32]  # type: ignore[operator]
