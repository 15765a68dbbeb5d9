"""Linear probes of poses: networks whose class capsules contain known factors, or noise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import narrow
from torchcaps.analysis import Subject, run_analysis
from torchcaps.analysis.pose import FACTORS, ProbeScores, pose_features, pose_targets, probe_pose, untrained_copy
from torchcaps.capsules import Capsules
from torchcaps.data import ImageSet, Loader
from torchcaps.models import Network

N, SYMMETRIES = 600, torch.tensor([4, 2, 1])


def factor_images(split: str, seed: int) -> ImageSet:
    """Return images whose first pixels are their factors: x, y, scale, cosine and sine of the multiplied angle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % 3
    metadata = {name: torch.rand(N, generator=generator) for name in ("x", "y", "scale")}
    metadata |= {"orientation": 2 * math.pi * torch.rand(N, generator=generator), "symmetry": SYMMETRIES[labels]}
    values = torch.cat(pose_targets(metadata), dim=1)  # [N, 5]
    images = torch.zeros(N, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 0, :5] = (127.5 * (1 + values)).round().to(torch.uint8)
    images[:, 0, 1, 0] = labels.to(torch.uint8)
    return ImageSet("factors", split, images, labels, ["square", "ellipse", "heart"], metadata)


class PixelPoses(nn.Module):
    """Class capsules with the factors that the first pixels of an image contain, rotated for each class."""

    def __init__(self, keep: list[int]) -> None:
        super().__init__()
        self.keep, self.unused = keep, nn.Parameter(torch.zeros(()))  # a network has a dtype
        self.bases = torch.linalg.qr(torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))).Q

    def forward(self, images: Tensor) -> Capsules:
        values = torch.zeros(len(images), 5)
        values[:, self.keep] = images[:, 0, 0, self.keep]
        return Capsules(torch.einsum("bd,jde->bje", values, self.bases))


class NoisePoses(nn.Module):
    """Class capsules that do not depend on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Capsules:
        return Capsules(torch.randn(len(images), 3, 5, generator=torch.Generator().manual_seed(len(images))))


def network(capsules: nn.Module) -> Network:
    model: Any = narrow("capsnet_small", classes=3, reconstruction=False)
    model.front, model.capsules = nn.Sequential(nn.Identity()), capsules
    return model


def scores(model: Network) -> ProbeScores:
    parts = []
    for split, seed in (("train", 1), ("test", 2)):
        dataset = factor_images(split, seed)
        features, labels, indices = pose_features(model, Loader(dataset, 100, train=False))
        parts.append((features, labels, [target[indices] for target in pose_targets(dataset.metadata)]))
    return probe_pose(parts[0], parts[1], 3)


def test_factors_in_the_class_capsule_are_found() -> None:
    found = scores(network(PixelPoses([0, 1, 2, 3, 4])))
    assert float(found.r2.min()) > 0.99
    assert (found.dim, found.n_train, found.n_test) == (5, N, N)


def test_only_the_factors_in_the_capsule_are_found() -> None:
    x, y, scale, orientation = scores(network(PixelPoses([0, 3, 4]))).mean()
    assert min(x, orientation) > 0.99
    assert max(y, scale) < 0.1


def test_noise_contains_no_factor() -> None:
    assert max(abs(value) for value in scores(network(NoisePoses())).mean()) < 0.1


def test_the_capsule_of_the_true_class_is_read() -> None:
    """Each class has a basis of its own: with the capsule of a fixed class, the labels would not matter."""
    model = network(PixelPoses([0, 1, 2, 3, 4]))
    dataset = factor_images("test", 2)
    features, labels, _ = pose_features(model, Loader(dataset, N, train=False))
    values = dataset.images[:, 0, 0, :5].double() / 255
    bases: Any = model.capsules.bases  # type: ignore[union-attr]
    torch.testing.assert_close(features, torch.einsum("bd,bde->be", values, bases.double()[labels]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("symmetry", "degrees"), [(4, 90), (2, 180), (1, 360)])
def test_an_orientation_is_known_modulo_the_symmetry(symmetry: int, degrees: int) -> None:
    angles = torch.tensor([0.3, 0.3 + math.radians(degrees), 0.3 + math.radians(degrees) / 2], dtype=torch.float64)
    metadata = {name: torch.zeros(3) for name in ("x", "y", "scale")}
    *_, target = pose_targets({**metadata, "orientation": angles, "symmetry": torch.full((3,), symmetry)})
    torch.testing.assert_close(target[0], target[1])
    torch.testing.assert_close(target[0], -target[2])


def test_r2_is_that_of_its_definition() -> None:
    x, y = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    x_test, y_test = torch.tensor([[2.0], [3.0]]).double(), torch.tensor([[2.0], [4.0]]).double()
    labels = torch.zeros(2, dtype=torch.int64)
    found = probe_pose((x, labels, [y] * 4), (x_test, labels, [y_test] * 4), 2, ridge=1e-12)
    torch.testing.assert_close(found.r2[0], torch.full((4,), 1 - 1 / 2, dtype=torch.float64))  # predicts 2 and 3
    assert bool(found.r2[1].isnan().all())  # a class without images
    assert found.mean() == pytest.approx([0.5] * 4)


def test_a_cnn_is_probed_at_the_input_of_its_last_layer() -> None:
    model = narrow("sabour2017_cnn_affnist", image=(1, 28, 28), classes=3, dropout=0.0)
    dataset = factor_images("test", 2).subset(torch.arange(10))
    features, _, indices = pose_features(model, Loader(dataset, 4, train=False))
    assert features.shape == (10, model.spec.features)  # type: ignore[attr-defined]
    assert indices.tolist() == list(range(10))
    with torch.no_grad():
        scores = model.front[-1](features.float())
        torch.testing.assert_close(scores, model(dataset.images / 255).scores)


def test_the_untrained_control_depends_on_its_seed_only() -> None:
    loader = Loader(factor_images("train", 1).subset(torch.arange(40)), 10, train=False)
    model = narrow("capsnet_images", image=(1, 28, 28), classes=3)
    state = torch.get_rng_state()
    one, same, other = (untrained_copy(model, loader, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [torch.cat([p.flatten() for p in net.parameters()]) for net in (one, same, other, model)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    norms = [module for module in one.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(int(norm.num_batches_tracked) == 4 for norm in norms)  # type: ignore[arg-type]
    assert not one.training


def test_the_analysis_reports_network_and_control() -> None:
    model = narrow("capsnet_small", classes=3, reconstruction=False)
    test = Loader(factor_images("test", 2), 200, train=False)
    subject = Subject("net", model, test, lambda n: factor_images("train", 1).subset(torch.arange(n or N)))
    report = run_analysis("pose", subject, n_train=300)
    rows = report.summary.rows
    assert list(rows) == ["net", "net, untrained"]
    assert (report.summary.n_images, rows["net"]["n_train"]) == (N, 300)
    assert set(FACTORS) <= set(rows["net"])
    assert set(rows["net"]["by_class"]) == {"square", "ellipse", "heart"}


def test_images_without_known_factors_are_rejected() -> None:
    dataset = factor_images("test", 2)
    del dataset.metadata["scale"]
    model = narrow("capsnet_small", classes=3, reconstruction=False)
    with pytest.raises(ValueError, match=r"scale is missing.*--data dsprites"):
        run_analysis("pose", Subject("net", model, Loader(dataset, 200, train=False), lambda n: dataset))


@pytest.mark.parametrize(("name", "value"), [("n_train", 0), ("ridge", 0.0), ("ridge", math.inf)])
def test_options_out_of_range_are_rejected(name: str, value: float) -> None:
    model = narrow("capsnet_small", classes=3, reconstruction=False)
    subject = Subject("net", model, Loader(factor_images("test", 2), 200, train=False))
    with pytest.raises(ValueError, match=name):
        run_analysis("pose", subject, **{name: value})
