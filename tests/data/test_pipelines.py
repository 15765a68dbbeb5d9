"""Pipelines: the transforms of each paper, and images that fit the models for which they are."""

import hashlib
from pathlib import Path

import pytest
import torch

import torchcaps
from tests.data.helpers import assert_bit_equal
from tests.tolerances import SAME, assert_different, relative_rms
from torchcaps._core.random import CounterRNG
from torchcaps.data import Batch, ImageSet, Pipeline, create_pipeline, list_pipelines
from torchcaps.data.geometry import RandomCrop, RandomHorizontalFlip, RandomShift
from torchcaps.data.pipelines import PIPELINES
from torchcaps.data.registry import find_spec
from torchcaps.data.transforms import Normalize, RandomBrightness, ScalePixels, Standardize, SubtractMeanImage
from torchcaps.models.registry import MODELS


def batch(*shape: int, objects: int = 0) -> Batch:
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    targets = torch.randint(0, 256, (shape[0], objects, *shape[1:]), dtype=torch.uint8) if objects else images
    return Batch(images, torch.zeros(shape[0]), targets, torch.arange(shape[0]))


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name in sorted(MODELS) for preset in MODELS.get(name).spec.presets]
)
def test_recipes_have_images_that_fit_the_model(name: str, preset: str) -> None:
    with torch.device("meta"):
        model = torchcaps.create_model(name, preset=preset)
    recipe = model.recipe
    pipeline = create_pipeline(recipe.augmentation)
    for data, train in ((recipe.data, True), (recipe.test_data or recipe.data, False)):
        spec = find_spec(data)
        if spec.image_shape is None:
            assert data == "folder"
            continue
        assert pipeline.output_shape(spec.image_shape, train) == model.spec.image
        assert spec.n_classes == model.spec.classes


def test_pipelines_are_used_by_recipes() -> None:
    used = set()
    for name in MODELS:
        for preset in ("paper", "official"):
            try:
                with torch.device("meta"):
                    used.add(torchcaps.create_model(name, preset=preset).recipe.augmentation)
            except ValueError:
                continue
    # Choi 2019 reports MNIST and CIFAR-10 with and without augmentation, and affNIST with pre-generated images
    assert set(list_pipelines()) - used == {"choi2019.mnist", "choi2019.cifar10", "choi2019.affnist-pregenerated"}
    assert used - {""} <= set(list_pipelines())


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_pipelines_run_and_are_deterministic_at_test_time(name: str) -> None:
    shape = (2, 48, 48) if "norb" in name else (3, 32, 32) if "cifar" in name or "svhn" in name else (1, 28, 28)
    shape = (2, 96, 96) if name.startswith("heinsen2019") else shape
    some = batch(12, *shape)
    dataset = ImageSet("some", "train", some.images, torch.zeros(12), ["a", "b"])
    pipeline = create_pipeline(name).fit(dataset)
    for train in (True, False):
        out = pipeline(some, seed=1, epoch=2, train=train)
        assert out.images.shape[1:] == pipeline.output_shape(shape, train)
        assert out.images.dtype == out.targets.dtype == torch.float32
        assert int((~torch.isfinite(out.images)).sum()) == 0
        assert 0 <= float(out.targets.min()) <= float(out.targets.max()) <= 1
        assert out.targets.shape == out.images.shape
    first, second = (pipeline(some, seed, epoch, train=False).images for seed, epoch in ((0, 0), (5, 9)))
    assert_bit_equal(first, second)


def test_pregenerated_images_are_the_same_in_all_epochs() -> None:
    """Those of the first epoch of the pipeline that augments on the fly; statistics of the data don't change that."""
    some = batch(6, 1, 28, 28)
    dataset = ImageSet("some", "train", some.images, torch.zeros(6), ["a", "b"])
    on_the_fly, once = (create_pipeline(f"choi2019.affnist{suffix}").fit(dataset) for suffix in ("", "-pregenerated"))
    first = on_the_fly(some, seed=3, epoch=0).images
    for epoch in (0, 1, 7):
        assert_bit_equal(once(some, seed=3, epoch=epoch).images, first)
    assert_different(on_the_fly(some, seed=3, epoch=1).images, first)
    assert_different(once(some, seed=4, epoch=0).images, first)


def test_scale_pixels_is_added_unless_present() -> None:
    assert Pipeline([RandomShift(2)]).train == (ScalePixels(255), RandomShift(2))
    assert Pipeline([ScalePixels(256)]).train == (ScalePixels(256),)
    assert Pipeline().test == (ScalePixels(255),)
    assert hash(Pipeline([RandomHorizontalFlip()])) == hash(Pipeline([RandomHorizontalFlip()]))


def test_targets_get_geometric_transforms_only() -> None:
    """Trap 14: each digit alone is reconstructed, transformed like its image."""
    some = batch(8, 1, 10, 12, objects=2)
    pipeline = Pipeline([RandomShift(2), RandomHorizontalFlip(), RandomCrop(8), RandomBrightness(0.5), Standardize()])
    out = pipeline(some, seed=3, epoch=1)
    assert out.targets.shape == (8, 2, 1, 8, 8)
    geometry = Pipeline([RandomShift(2), RandomHorizontalFlip(), RandomCrop(8)])
    for number in range(2):
        alone = Batch(some.targets[:, number], some.labels, some.targets[:, number], some.indices)
        assert_bit_equal(geometry(alone, seed=3, epoch=1).images, out.targets[:, number])
    plain = geometry(some, seed=3, epoch=1)
    assert_bit_equal(plain.targets, out.targets)
    assert_different(plain.images, out.images)


def test_targets_get_geometric_transforms_after_color_transforms() -> None:
    some = batch(6, 2, 48, 48)
    out = create_pipeline("hinton2018.smallnorb")(some, seed=0, epoch=0)
    raw = some.images.float() / 255
    for image, target in zip(raw, out.targets, strict=True):
        places = image.unfold(1, 32, 1).unfold(2, 32, 1)  # the target is one of the crop_windows of the raw image
        assert int((places.permute(1, 2, 0, 3, 4) == target).all((2, 3, 4)).sum()) > 0


def test_pipelines_equal_the_reviewed_snapshot() -> None:
    """`pipelines.txt` was reviewed against the papers: a changed number of a pipeline must show in its diff."""
    lines = []
    for name in list_pipelines():
        for kind in ("train", "test"):
            lines += [f"{name} {kind}: {', '.join(map(str, getattr(create_pipeline(name), kind)))}"]
    assert lines == (Path(__file__).parent / "pipelines.txt").read_text().splitlines()


def test_transform_in_both_lists_is_fitted_once() -> None:
    some = batch(10, 3, 32, 32)
    dataset = ImageSet("some", "train", some.images, torch.zeros(10), ["a", "b"])
    fitted = create_pipeline("chen2019.cifar10").fit(dataset)
    means = [
        transform.mean
        for transforms in (fitted.train, fitted.test)
        for transform in transforms
        if isinstance(transform, SubtractMeanImage)
    ]
    assert len(means) == 2
    assert means[0] is means[1]
    assert create_pipeline("sabour2017.mnist").fit(dataset) == create_pipeline("sabour2017.mnist")
    given = torch.zeros(3, 32, 32)
    mixed = Pipeline([Normalize([0.5] * 3, [0.5] * 3), SubtractMeanImage(given)], [SubtractMeanImage()]).fit(dataset)  # type: ignore[arg-type]
    means = [
        transform.mean
        for transforms in (mixed.train, mixed.test)
        for transform in transforms
        if isinstance(transform, SubtractMeanImage)
    ]
    assert means[0] is given  # what is known already stays
    some = dataset.images.double().mean(0)
    for scale in (255, 256):  # the mean image is in the scale of its list
        (_, transform) = Pipeline([ScalePixels(scale), SubtractMeanImage()]).fit(dataset).train
        assert isinstance(transform, SubtractMeanImage)
        assert (
            relative_rms(transform(torch.zeros(1, 3, 32, 32), CounterRNG(0, 0, torch.arange(1)))[0], -some / scale)
            < SAME[torch.float32]
        )
    assert mixed.is_fitted


def test_invalid_pipelines() -> None:
    with pytest.raises(ValueError, match=r"'sabour2017\.mnst'.*'sabour2017\.mnist'"):
        create_pipeline("sabour2017.mnst")
    with pytest.raises(TypeError, match=r"train.*'flip'"):
        Pipeline(["flip"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"train.*RandomShift\(max_shift=2\)"):
        Pipeline(RandomShift(2))  # type: ignore[arg-type]


# SHA-256 of the transformed targets of a training batch, in bytes. Targets pass through geometric transforms only;
# without interpolation these move bytes by whole pixels, so the values are equal on all machines. A renamed random
# stream changes them.
PINNED_TARGETS = {
    "byerly2021.smallnorb": "8bf208b0d9406166",
    "chen2019.cifar10": "45085675960adc1d",
    "chen2019.mnist": "45085675960adc1d",
    "choi2019.cifar10": "45085675960adc1d",
    "choi2019.mnist": "45085675960adc1d",
    "heinsen2019.smallnorb": "5c56cadc6ba62ff0",
    "hinton2018.smallnorb": "8bf208b0d9406166",
    "mazzia2021.smallnorb": "45085675960adc1d",
    "photos": "d6ae173d67a42bf5",
    "photos-4px": "a37d2b5d1da25d62",
    "sabour2017.cifar10": "b8eaa1e30bf03a45",
    "sabour2017.expanded-mnist": "45085675960adc1d",
    "sabour2017.mnist": "6ea90226b6dd8df5",
    "sabour2017.multimnist": "45085675960adc1d",
    "sabour2017.smallnorb": "8bf208b0d9406166",
    "sabour2017.smallnorb-official": "62fb5f7bc6d4a055",
    "sabour2017.svhn": "45085675960adc1d",
    "tsai2020.cifar10": "19fbe8daaad1356a",
    "tsai2020.cifar100": "19fbe8daaad1356a",
}


INTERPOLATING = ("RandomAffine", "RandomRotation")
BYTEWISE = [name for name in list_pipelines() if not any(kind in str(PIPELINES[name]) for kind in INTERPOLATING)]


@pytest.mark.parametrize("name", BYTEWISE)
def test_integer_transforms_are_pinned(name: str) -> None:
    side = 96 if name.startswith("heinsen2019") else 48
    bytes_ = torch.arange(8 * 3 * side * side).mul(2_654_435_761).bitwise_right_shift(7).to(torch.uint8)
    images = bytes_.view(8, 3, side, side)
    pipeline = create_pipeline(name).fit(ImageSet("some", "train", images, torch.zeros(8), ["a", "b"]))
    (scale,) = [transform.scale for transform in pipeline.train if isinstance(transform, ScalePixels)]
    targets = pipeline(Batch(images, torch.zeros(8), images, 1_000 * torch.arange(8)), seed=3, epoch=2).targets
    digest = hashlib.sha256((targets * scale).round().to(torch.uint8).contiguous().numpy().tobytes()).hexdigest()
    assert digest[:16] == PINNED_TARGETS[name]
