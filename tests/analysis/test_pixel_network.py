"""Networks that take pixels in 0..1, whatever their preprocessing."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.models.narrow import narrow
from tests.tolerances import SAME, relative_rms
from torchcaps.analysis import PixelNetwork, fgsm
from torchcaps.analysis.common import evaluate_predictions
from torchcaps.data import (
    CenterCrop,
    Loader,
    Normalize,
    Pipeline,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    create_dataset,
)


def pipelines(shape: tuple[int, int, int]) -> dict[str, list[Any]]:
    mean = torch.rand(shape, generator=torch.Generator().manual_seed(0)) / 3
    return {
        "none": [],
        "mean image": [ScalePixels(256), SubtractMeanImage(mean)],
        "normalize": [Normalize((0.3,), (0.2,))],
        "crop, then standardize": [CenterCrop(24), Standardize()],
        "standardize, then crop": [Standardize(), CenterCrop(24)],
    }


@pytest.mark.parametrize("name", pipelines((1, 28, 28)))
def test_scores_are_those_of_the_preprocessed_images(name: str) -> None:
    dataset = create_dataset("digits", "test").subset(torch.arange(6))
    pipeline = Pipeline([], pipelines(dataset.shape)[name])
    model: Any = narrow("capsnet_small").eval()
    if "crop" in name:
        model.front[0] = torch.nn.Sequential(torch.nn.ZeroPad2d(2), model.front[0])
        cropped = dataclasses.replace(model.spec, image=(1, 24, 24))
        model.set_origin(cropped, model.name, model.recipe, model.n_objects)
    network = PixelNetwork(model, pipeline, dataset.shape)
    (prepared,) = Loader(dataset, 6, pipeline=pipeline, train=False).epoch(0)
    (pixels,) = Loader(dataset, 6, pipeline=network.pipeline, train=False).epoch(0)
    assert network.spec.image == pixels.images.shape[1:]
    assert network.spec.image[1] == (24 if name.startswith("crop") else 28)
    assert 0 <= float(pixels.images.min()) <= float(pixels.images.max()) <= 1
    with torch.no_grad():
        expected, scores = model(prepared.images).scores, network(pixels.images).scores
    assert relative_rms(scores, expected) < SAME[torch.float32]
    assert evaluate_predictions(network, pixels.images, pixels.labels)[0].shape == (6,)
    changed = fgsm(network, pixels.images, pixels.labels, eps=8 / 255)
    assert float((changed - pixels.images).abs().max()) == pytest.approx(8 / 255, rel=1e-4)
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1


def test_a_pipeline_that_changes_colors_before_scaling_is_rejected() -> None:
    pipeline = Pipeline([], [Standardize(), ScalePixels()])
    with pytest.raises(ValueError, match="pipeline"):
        PixelNetwork(narrow("capsnet_small"), pipeline, (1, 28, 28))
