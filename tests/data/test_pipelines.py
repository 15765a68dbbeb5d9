"""The papers' pipelines: that they are what the papers say, and that the models they are for can take their images."""

from pathlib import Path

import pytest
import torch

import torchcaps
from tests.tolerances import SAME, relative_rms
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


@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_data_and_pipeline_of_every_recipe_give_what_the_model_takes(name: str, preset: str) -> None:
    with torch.device("meta"):
        try:
            model = torchcaps.create_model(name, preset=preset)
        except ValueError:
            pytest.skip("this model has one preset")
    recipe = model.recipe
    pipeline = create_pipeline(recipe.augmentation)
    for data, train in ((recipe.data, True), (recipe.test_data or recipe.data, False)):
        spec = find_spec(data)
        if spec.image_shape is None:
            assert data == "folder"
            continue
        assert pipeline.output_shape(spec.image_shape, train) == model.spec.image
        assert spec.n_classes == model.spec.classes


def test_every_named_pipeline_is_used_by_a_recipe_or_is_a_papers_variant() -> None:
    used = set()
    for name in MODELS:
        for preset in ("paper", "official"):
            try:
                with torch.device("meta"):
                    used.add(torchcaps.create_model(name, preset=preset).recipe.augmentation)
            except ValueError:
                continue
    # Choi 2019 reports MNIST and CIFAR-10 with and without augmentation
    assert set(list_pipelines()) - used == {"choi2019.mnist", "choi2019.cifar10"}
    assert used - {""} <= set(list_pipelines())


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_every_pipeline_runs_and_leaves_test_images_to_no_chance(name: str) -> None:
    shape = (2, 48, 48) if "norb" in name else (3, 32, 32) if "cifar" in name or "svhn" in name else (1, 28, 28)
    some = batch(12, *shape)
    dataset = ImageSet("some", "train", some.images, torch.zeros(12), ["a", "b"])
    pipeline = create_pipeline(name).fit(dataset)
    for train in (True, False):
        out = pipeline(some, seed=1, epoch=2, train=train)
        assert out.images.shape[1:] == pipeline.output_shape(shape, train)
        assert out.images.dtype == out.targets.dtype == torch.float32
        assert bool(torch.isfinite(out.images).all())
        assert 0 <= float(out.targets.min()) <= float(out.targets.max()) <= 1
        assert out.targets.shape == out.images.shape
    first, second = (pipeline(some, seed, epoch, train=False).images for seed, epoch in ((0, 0), (5, 9)))
    assert torch.equal(first, second)


def test_pixels_come_first_unless_named() -> None:
    assert Pipeline([RandomShift(2)]).train == (ScalePixels(255), RandomShift(2))
    assert Pipeline([ScalePixels(256)]).train == (ScalePixels(256),)
    assert Pipeline().test == (ScalePixels(255),)
    assert hash(Pipeline([RandomHorizontalFlip()])) == hash(Pipeline([RandomHorizontalFlip()]))


def test_targets_move_with_their_image_and_keep_their_colours() -> None:
    """Trap 14: what is reconstructed is each digit alone, moved as its image was."""
    some = batch(8, 1, 10, 12, objects=2)
    pipeline = Pipeline([RandomShift(2), RandomHorizontalFlip(), RandomCrop(8), RandomBrightness(0.5), Standardize()])
    out = pipeline(some, seed=3, epoch=1)
    assert out.targets.shape == (8, 2, 1, 8, 8)
    geometry = Pipeline([RandomShift(2), RandomHorizontalFlip(), RandomCrop(8)])
    for number in range(2):
        alone = Batch(some.targets[:, number], some.labels, some.targets[:, number], some.indices)
        assert torch.equal(geometry(alone, seed=3, epoch=1).images, out.targets[:, number])
    plain = geometry(some, seed=3, epoch=1)
    assert torch.equal(plain.targets, out.targets)
    assert not torch.equal(plain.images, out.images)


def test_targets_follow_geometry_that_comes_after_colour() -> None:
    some = batch(6, 2, 48, 48)
    out = create_pipeline("hinton2018.smallnorb")(some, seed=0, epoch=0)
    raw = some.images.float() / 255
    for image, target in zip(raw, out.targets, strict=True):
        places = image.unfold(1, 32, 1).unfold(2, 32, 1)  # the target is one of the crop_windows of the raw image
        assert bool((places.permute(1, 2, 0, 3, 4) == target).all((2, 3, 4)).any())


def test_every_pipeline_is_the_papers_step_by_step() -> None:
    """`pipelines.txt` beside this file, read against the papers; the numbers of a pipeline are never changed unseen."""
    lines = []
    for name in list_pipelines():
        for kind in ("train", "test"):
            lines += [f"{name} {kind}: {', '.join(map(str, getattr(create_pipeline(name), kind)))}"]
    assert lines == (Path(__file__).parent / "pipelines.txt").read_text().splitlines()


def test_a_pipeline_is_fitted_once_for_both_lists() -> None:
    some = batch(10, 3, 32, 32)
    dataset = ImageSet("some", "train", some.images, torch.zeros(10), ["a", "b"])
    fitted = create_pipeline("chen2019.cifar10").fit(dataset)
    means = [
        step.mean for steps in (fitted.train, fitted.test) for step in steps if isinstance(step, SubtractMeanImage)
    ]
    assert len(means) == 2
    assert means[0] is means[1]
    assert create_pipeline("sabour2017.mnist").fit(dataset) == create_pipeline("sabour2017.mnist")
    given = torch.zeros(3, 32, 32)
    mixed = Pipeline([Normalize([0.5] * 3, [0.5] * 3), SubtractMeanImage(given)], [SubtractMeanImage()]).fit(dataset)  # type: ignore[arg-type]
    means = [step.mean for steps in (mixed.train, mixed.test) for step in steps if isinstance(step, SubtractMeanImage)]
    assert means[0] is given  # what is known already stays
    some = dataset.images.double().mean(0)
    for scale in (255, 256):  # the mean image is in the scale of its list
        (_, step) = Pipeline([ScalePixels(scale), SubtractMeanImage()]).fit(dataset).train
        assert isinstance(step, SubtractMeanImage)
        assert (
            relative_rms(step(torch.zeros(1, 3, 32, 32), CounterRNG(0, 0, torch.arange(1)))[0], -some / scale)
            < SAME[torch.float32]
        )
    assert mixed.fitted


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'sabour2017\.mnist'"):
        create_pipeline("sabour2017.mnst")
    with pytest.raises(TypeError, match=r"a list of steps such as RandomShift\(2\), got 'flip'"):
        Pipeline(["flip"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"a list of steps such as \[RandomShift\(2\)\], got RandomShift\(most=2\)"):
        Pipeline(RandomShift(2))  # type: ignore[arg-type]
