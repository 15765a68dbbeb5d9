"""Exported files as input: predictions, evaluation, and rejection of hostile files."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image

from tests.cli.commands import run_command, usage_error
from tests.fuzz.exports import make_graph
from torchcaps import nn
from torchcaps.data import create_dataset
from torchcaps.data.images import ImageFormat, read_image
from torchcaps.export import (
    ExportFormatError,
    OnnxModel,
    export_run,
    load_onnx,
    quantize_onnx,
    to_onnx,
    to_pt2,
    validate_onnx,
)
from torchcaps.export import reader as reader_module
from torchcaps.training import load_run, prediction
from torchcaps.training.inference import evaluate_runs
from torchcaps.training.prediction import predict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    """An image file of the size that the model expects."""
    pixels = create_dataset("digits", "test").get_batch(torch.tensor([3])).images[0, 0].numpy()
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    np.save(tmp_path / "digit.npy", pixels)
    return tmp_path / "digit.png"


def test_predictions_equal_those_of_the_run(registered_run: Path, exported: Path, digit: Path) -> None:
    run, loaded = load_run(registered_run), load_onnx(exported)
    assert isinstance(loaded.model, OnnxModel)
    assert loaded.classes == run.classes
    expected, found = predict(run, digit), predict(loaded, digit)
    assert found.classes == expected.classes
    assert found.scores == pytest.approx(expected.scores, abs=1e-5)
    assert found.reconstruction is not None
    assert expected.reconstruction is not None
    assert float((found.reconstruction - expected.reconstruction).abs().max()) < 1e-5
    dataset = create_dataset("digits", "test").subset(torch.arange(0, 1000, 25))  # type: ignore[attr-defined]
    assert evaluate_runs([loaded], dataset).confusion == evaluate_runs([run], dataset).confusion


def test_commands(
    exported: Path, digit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = json.loads(run_command(capsys, "predict", str(exported), str(digit), "--json"))
    assert len(row["scores"]) == 10
    text = run_command(capsys, "evaluate", str(exported), "--num-threads", "1")
    assert "1,000 images" in text
    assert "--weights" in usage_error("evaluate", str(exported), "--weights", "best")


@pytest.mark.parametrize(
    "options", [["--plain"], ["--format", "pt2", "--quantize", "int8"], ["--format", "pt2", "--decoder", "none"]]
)
def test_options_of_the_other_format_are_rejected(options: list[str], registered_run: Path) -> None:
    usage_error("export", str(registered_run), *options)


def test_data_of_another_shape_is_rejected(registered_run: Path) -> None:
    dataset = create_dataset("multimnist", "test", source="digits")
    with pytest.raises(ValueError, match="36x36"):
        export_run(load_run(registered_run), dataset=dataset)


def test_example_script_gives_the_same_scores(exported: Path, digit: Path) -> None:
    """The script imports neither torch nor torchcaps."""
    script = ROOT / "examples" / "onnx_predict.py"
    assert len(script.read_text().splitlines()) < 40
    blocked = "import sys; sys.modules['torch'] = sys.modules['torchcaps'] = None; sys.argv = sys.argv[1:]; "
    run = f"{blocked} exec(open(sys.argv[0]).read())"
    command = [sys.executable, "-c", run, script, exported, digit.with_suffix(".npy")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, score = text.splitlines()[0].split()
    expected = predict(load_onnx(exported), digit)
    assert (name, float(score)) == (expected.classes[0], pytest.approx(max(expected.scores), abs=1e-4))


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_quantisation(kind: Any, exported: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.onnx"
    assert quantize_onnx(exported, target, kind) == target.stat().st_size < 0.7 * exported.stat().st_size
    images = torch.rand(4, 1, 28, 28)
    found, expected = (load_onnx(path).model(images).scores for path in (target, exported))
    assert 0 < float((found - expected).abs().max()) < 0.02
    metadata, original = ({p.key: p.value for p in onnx.load(path).metadata_props} for path in (target, exported))
    assert metadata == original  # each value is JSON, also for programs that read all of them


# hostile files ---------------------------------------------------------------------------------------------


def external(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def external_without_flag(model: Any) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="/etc/passwd")


def external_attribute(model: Any) -> None:
    tensor = TensorProto(data_type=1, dims=[1], data_location=TensorProto.EXTERNAL, name="hidden")
    model.graph.node.append(helper.make_node("Constant", [], ["hidden"], value=tensor))


def custom_domain(model: Any) -> None:
    model.opset_import.add(domain="com.microsoft", version=1)


def custom_node(model: Any) -> None:
    model.graph.node[0].domain = "evil.org"


def local_function(model: Any) -> None:
    model.functions.add(name="f", domain="", opset_import=[helper.make_opsetid("", 20)])


def loop(model: Any) -> None:
    body = helper.make_graph([], "body", [], [])
    model.graph.node.append(helper.make_node("Loop", ["", ""], ["x"], body=body))


def nested_graph(model: Any) -> None:
    body = helper.make_graph([], "body", [], [])
    model.graph.node.append(helper.make_node("Identity", ["images"], ["x"], body=body))


def huge_constant(model: Any) -> None:
    model.graph.initializer.add(name="huge", data_type=1, dims=[2**40])


def overflowing_constant(model: Any) -> None:
    model.graph.initializer.add(name="huge", data_type=1, dims=[2**33, 2**33])


def negative_size(model: Any) -> None:
    model.graph.initializer.add(name="negative", data_type=1, dims=[-1])


def huge_result(model: Any) -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2**20, 2**20])
    model.graph.initializer.append(shape)
    model.graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["huge"]))


def no_metadata(model: Any) -> None:
    del model.metadata_props[:]


def set_metadata(key: str, value: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for entry in model.metadata_props:
            if entry.key == key:
                entry.value = value

    change.__name__ = f"{key}={value[:20]}"
    return change


def renamed_output(model: Any) -> None:
    model.graph.output[0].name = "capsules"


HOSTILE = [
    *(external, external_without_flag, external_attribute, custom_domain, custom_node, local_function, loop),
    *(nested_graph, huge_constant, overflowing_constant, negative_size, huge_result, no_metadata, renamed_output),
    set_metadata("classes", '["a"]'),
    set_metadata("classes", "[" * 5000),
    set_metadata("classes", json.dumps(["\ud800", *"bcdefghij"])),  # no font can draw a lone surrogate
    set_metadata("classes", json.dumps(["x" * 1001] * 10)),
    set_metadata("image", "[1, 65536, 65536]"),
    set_metadata("image", "[1, 28, true]"),
    set_metadata("std", "[0]"),
    set_metadata("std", "[1, 1]"),
    set_metadata("mean", "[NaN]"),
    set_metadata("mean", "[1e999]"),
    set_metadata("scale", "0"),
    set_metadata("objects", "11"),
    set_metadata("probabilities", '"exec"'),
    set_metadata("fit", '"../.."'),
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_hostile_files_are_rejected(change: Callable[[Any], None], exported: Path, tmp_path: Path) -> None:
    model = onnx.load(exported)
    change(model)
    path = tmp_path / "hostile.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportFormatError) as raised:
        load_onnx(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_other_content_is_rejected(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = exported.read_bytes()
    for damaged in (b"", b"no protobuf", content[: len(content) // 2], bytes(100)):
        with pytest.raises(ExportFormatError):
            validate_onnx(damaged)
    with pytest.raises(ValueError, match="not a file"):
        load_onnx(tmp_path)
    monkeypatch.setattr(reader_module, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ExportFormatError):
        load_onnx(exported)


def test_graphs_that_fail_in_onnxruntime_are_one_sentence(
    tmp_path: Path, digit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph for images of another size fails when it is evaluated; a name that is not UTF-8 when it is loaded."""
    model, path = make_graph(), tmp_path / "model.onnx"
    set_metadata("image", "[1, 7, 7]")(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportFormatError, match="can't run"):
        load_onnx(path).model(torch.zeros(1, 1, 7, 7))
    assert "can't run" in usage_error("predict", str(path), str(digit))
    path.write_bytes(make_graph().SerializeToString().replace(b"axis", b"axi\xff", 1))
    capsys.readouterr()
    with pytest.raises(ExportFormatError):
        load_onnx(path)
    assert capsys.readouterr().out == ""


def test_images_of_any_size_are_not_enlarged(tmp_path: Path, digit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits are located at ten times the size of the network's input, which a file can choose."""
    model, path = make_graph(), tmp_path / "model.onnx"
    set_metadata("image", "[1, 3000, 3000]")(model)
    set_metadata("data", '"mnist"')(model)
    path.write_bytes(model.SerializeToString())
    sizes: list[int] = []

    def read(path: Path, image_format: ImageFormat, *arguments: str) -> torch.Tensor:
        sizes.append(math.prod(image_format.size))
        return read_image(path, dataclasses.replace(image_format, size=(30, 30)), *arguments).repeat(1, 100, 100)

    monkeypatch.setattr(prediction, "read_image", read)
    pixels, _ = prediction.load_image(load_onnx(path), digit)
    assert pixels.shape == (1, 3000, 3000)
    assert max(sizes) == 3000**2


def test_output_of_predict_is_escaped(tmp_path: Path, digit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in the file, and names of image files, must not control the terminal."""
    model, path = make_graph(), tmp_path / "model.onnx"
    set_metadata("classes", json.dumps(["a\x1b[31m", "$\\frac{$", "c\u202e"]))(model)
    path.write_bytes(model.SerializeToString())
    image = tmp_path / "\x1b[32m.png"
    image.write_bytes(digit.read_bytes())
    for flags in ([], ["--csv"], ["--json"]):
        text = run_command(capsys, "predict", str(path), str(image), "--out", str(tmp_path / "out"), *flags)
        assert all(character.isprintable() or character == "\n" for character in text)
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_memory_of_sizes_that_a_graph_computes_is_limited(tmp_path: Path) -> None:
    """The size of a tensor, 4 TiB, follows from the image, so that it is not known before the graph runs."""
    model, path = make_graph(), tmp_path / "model.onnx"
    model.graph.initializer.append(helper.make_tensor("two_to_40", TensorProto.FLOAT, [1], [2.0**40]))
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["images"], ["brightest"], keepdims=0),
            helper.make_node("Mul", ["brightest", "two_to_40"], ["product"]),
            helper.make_node("Cast", ["product"], ["size"], to=TensorProto.INT64),
            helper.make_node("ConstantOfShape", ["size"], ["huge"]),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("huge", TensorProto.FLOAT, [None]))
    path.write_bytes(model.SerializeToString())
    network = load_onnx(path).model
    assert network(torch.zeros(1, *network.spec.image)).scores.shape == (1, network.spec.classes)
    with pytest.raises(ExportFormatError, match="half of the memory"):
        network(torch.ones(1, *network.spec.image))


def test_unusable_outputs_are_one_sentence(exported: Path, tmp_path: Path) -> None:
    layer, children = nn.DenseCapsules(3, 2, 2, 2, routing="dynamic"), torch.randn(2, 3, 2)
    path = tmp_path / "directory.pt2"
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(ValueError, match=r"directory\.pt2 can't be written"):
        quantize_onnx(exported, path, "float16")
    for export in (to_onnx, to_pt2):
        with pytest.raises(ValueError, match=r"directory\.pt2 can't be written"):
            export(layer, path, example=children)
        with pytest.raises(ValueError, match="not a directory"):
            export(layer, path / "file" / "model", example=children)
    with pytest.raises(ValueError, match="decoder"):
        to_onnx(layer, tmp_path / "model.onnx", example=children, decoder="beside")
    assert [file.name for file in tmp_path.iterdir()] == ["directory.pt2"]


def test_unregistered_data_set_is_not_imported(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('executed')")
    model = onnx.load(exported)
    set_metadata("data", '"evil_module.Spec"')(model)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert load_onnx(tmp_path / "model.onnx").spec.recipe.data == ""
    assert "--data" in usage_error("evaluate", str(tmp_path / "model.onnx"))
