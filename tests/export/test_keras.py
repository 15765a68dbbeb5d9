"""Weights in the layout of Keras: the converted network computes what the Keras code would."""

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.cli.commands import run_command, usage_error
from torchcaps.export import ConversionError, convert_keras
from torchcaps.export.keras import read_arrays

IMAGE, WIDTH, TYPES, K, J, D, HIDDEN = (1, 12, 12), 5, 3, 4, 6, 2, (7, 9)
SIZE = 4  # of the grid, with kernel size 3: 12, 10, 4


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays of a small CapsNet, named as Keras names them."""
    generator = np.random.default_rng(seed)
    shapes = {
        "conv1/conv1/kernel:0": (3, 3, 1, WIDTH),
        "conv1/conv1/bias:0": (WIDTH,),
        "primarycap_conv2d/primarycap_conv2d/kernel:0": (3, 3, WIDTH, TYPES * K),
        "primarycap_conv2d/primarycap_conv2d/bias:0": (TYPES * K,),
        "digitcaps/digitcaps/W:0": (1, J, SIZE * SIZE * TYPES, D, K),
    }
    widths = (J * D, *HIDDEN, 144)
    for index, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        shapes[f"decoder/dense_{index}/kernel:0"] = (before, after)
        shapes[f"decoder/dense_{index}/bias:0"] = (after,)
    return {name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def keras_forward(weights: dict[str, np.ndarray], images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute class capsules and reconstruction as Keras code does: channels last, W as ``[J, I, D, K]``."""
    w = {name: torch.from_numpy(array) for name, array in weights.items()}

    def conv(x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        kernel = w[f"{name}/kernel:0"].permute(3, 2, 0, 1)
        return F.conv2d(x.permute(0, 3, 1, 2), kernel, w[f"{name}/bias:0"], stride).permute(0, 2, 3, 1)

    def squash(s: torch.Tensor) -> torch.Tensor:
        norm = s.square().sum(-1, keepdim=True)
        return norm / (1 + norm) / norm.sqrt() * s

    x = conv(images.permute(0, 2, 3, 1), "conv1/conv1", 1).relu()
    x = conv(x, "primarycap_conv2d/primarycap_conv2d", 2)
    u = squash(x.reshape(len(x), -1, K))
    votes = torch.einsum("jidk,bik->bjid", w["digitcaps/digitcaps/W:0"][0], u)
    logits = torch.zeros(votes.shape[:3])
    for t in range(3):
        v = squash((logits.softmax(1).unsqueeze(-1) * votes).sum(2))
        if t < 2:
            logits = logits + torch.einsum("bjid,bjd->bji", votes, v)
    masked = v * F.one_hot(v.norm(dim=-1).argmax(1), J).unsqueeze(-1)
    y = masked.flatten(1)
    for index in (1, 2, 3):
        y = y @ w[f"decoder/dense_{index}/kernel:0"] + w[f"decoder/dense_{index}/bias:0"]
        y = y.sigmoid() if index == 3 else y.relu()
    return v, y.view(len(y), *IMAGE)


def write_h5(path: Path, weights: dict[str, np.ndarray]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in weights.items():
            file[name] = array
    return path


@pytest.mark.parametrize("suffix", ["h5", "npz"])
def test_converted_network_equals_the_keras_code(suffix: str, tmp_path: Path) -> None:
    weights = arrays()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "h5":
        write_h5(path, weights)
    else:
        np.savez(path, **weights)  # type: ignore[arg-type]
    model = convert_keras(path, IMAGE)
    images = torch.rand(3, *IMAGE)
    with torch.no_grad():
        output = model(images)
    capsules, reconstruction = keras_forward(weights, images)
    assert output.capsules is not None
    assert float((output.capsules.pose - capsules).abs().max()) < 1e-5
    assert float((output.reconstruction - reconstruction).abs().max()) < 1e-5


def test_other_orders_of_children_and_channels(tmp_path: Path) -> None:
    weights = arrays()
    np.savez(tmp_path / "keras.npz", **weights)  # type: ignore[arg-type]
    name = "digitcaps/digitcaps/W:0"
    by_type = weights[name].reshape(1, J, SIZE * SIZE, TYPES, D, K).transpose(0, 1, 3, 2, 4, 5)
    weights[name] = by_type.reshape(1, J, -1, D, K)
    for key in ("kernel:0", "bias:0"):
        key = f"primarycap_conv2d/primarycap_conv2d/{key}"
        split = weights[key].reshape(*weights[key].shape[:-1], TYPES, K)
        weights[key] = split.swapaxes(-1, -2).reshape(weights[key].shape)
    np.savez(tmp_path / "other.npz", **weights)  # type: ignore[arg-type]
    expected = convert_keras(tmp_path / "keras.npz", IMAGE).state_dict()
    found = convert_keras(tmp_path / "other.npz", IMAGE, child_order="type", channel_order="dim").state_dict()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_weights_of_keras_3_and_optimizer_states(tmp_path: Path) -> None:
    weights = arrays()
    expected = convert_keras(write_h5(tmp_path / "keras.h5", weights), IMAGE).state_dict()
    renamed = {}
    for name, array in weights.items():
        layer, kind = name.rsplit("/", 1)
        renamed[f"layers/{layer}/vars/{int('bias' in kind)}"] = array
        renamed[f"optimizer/vars/{len(renamed)}"] = renamed[f"optimizer_weights/{name}"] = array
    found = convert_keras(write_h5(tmp_path / "keras3.weights.h5", renamed), IMAGE).state_dict()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_weights_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    weights = arrays()
    weights["conv1/conv1/bias:0"][0] = np.nan
    np.savez(tmp_path / "keras.npz", **weights)  # type: ignore[arg-type]
    assert "conv1/conv1/bias:0 contains NaN" in usage_error("convert", str(tmp_path / "keras.npz"))


def test_hostile_and_unsuitable_files(tmp_path: Path) -> None:
    outside = write_h5(tmp_path / "outside.h5", {"secret": np.ones(3, np.float32)})
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["kernel"] = h5py.ExternalLink(str(outside), "secret")
    (tmp_path / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    np.savez(tmp_path / "complex.npz", a=np.ones(3, np.complex64))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "weights.txt").write_text("")
    for name in ("links.h5", "broken.h5", "objects.npz", "complex.npz", "broken.npz", "weights.txt", "missing.h5"):
        with pytest.raises(ConversionError) as raised:
            read_arrays(tmp_path / name)
        assert "\n" not in str(raised.value)
    weights = arrays()
    changes = {
        "conv1/conv1/bias:0": None,
        "digitcaps/digitcaps/W:0": weights["conv1/conv1/bias:0"],
        "other": np.zeros((3, 0), np.float32),
    }
    for key, change in changes.items():
        np.savez(tmp_path / "changed.npz", **{k: v for k, v in (weights | {key: change}).items() if v is not None})
        with pytest.raises(ConversionError):
            convert_keras(tmp_path / "changed.npz", IMAGE)
    np.savez(tmp_path / "keras.npz", **weights)  # type: ignore[arg-type]
    assert "image" in usage_error("convert", str(tmp_path / "keras.npz"), "--out", str(tmp_path / "x.onnx"))
    assert not (tmp_path / "x.onnx").exists()


KERNEL = "primarycap_conv2d/primarycap_conv2d/kernel:0"


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({KERNEL: np.zeros((4, 4, WIDTH, TYPES * K), np.float32)}, "kernels of the same size, got 3x3 and 4x4"),
        ({"digitcaps/digitcaps/W:0": np.zeros((1, SIZE * SIZE * TYPES, D, K), np.float32)}, "at least 2 classes"),
    ],
)
def test_layouts_that_no_network_has_are_rejected(changed: dict[str, np.ndarray], match: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "net.npz", **{**arrays(), **changed})  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=match):
        convert_keras(tmp_path / "net.npz", IMAGE)


def test_a_missing_bias_names_an_array_that_would_be_found(tmp_path: Path) -> None:
    """Kernels whose name does not contain "kernel" have no name of a bias that follows from it."""
    weights = arrays()
    weights["conv1_k"] = weights.pop("conv1/conv1/kernel:0")
    np.savez(tmp_path / "net.npz", **weights)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="expected an array conv1_k/bias, next to the kernel conv1_k/kernel"):
        convert_keras(tmp_path / "net.npz", IMAGE)


@pytest.mark.parametrize(
    "arguments", [{"child_order": "types"}, {"channel_order": "dims"}, {"image": (12, 12)}, {"image": (1, 0, 12)}]
)
def test_invalid_arguments(arguments: dict, tmp_path: Path) -> None:
    np.savez(tmp_path / "net.npz", **arrays())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} must be"):
        convert_keras(tmp_path / "net.npz", **{"image": IMAGE, **arguments})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = {name: array for name, array in arrays().items() if not name.startswith("decoder")}  # a smaller graph
    np.savez(tmp_path / "keras.npz", **encoder)  # type: ignore[arg-type]
    out = tmp_path / "model.onnx"
    assert "'mnist'" in usage_error("convert", str(tmp_path / "keras.npz"), "--data", "mnits", "--out", str(out))
    text = run_command(capsys, "convert", str(tmp_path / "keras.npz"), "--image", "1,12,12", "--out", str(out))
    assert str(out) in text
    assert out.exists()
