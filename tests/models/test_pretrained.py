"""Pretrained weights: written and read offline, rejected if they do not fit."""

from pathlib import Path

import pytest
import torch

from tests.models.narrow import narrow
from tests.tolerances import assert_equal
from torchcaps import create_model
from torchcaps.data import create_dataset, create_pipeline
from torchcaps.models import list_pretrained, model_card, pretrained
from torchcaps.models.registry import MODELS
from torchcaps.training import RunSpec, TrainedRun
from torchcaps.training.setup import limit_images

NAME = "mazzia2021_mnist"
CLASSES = tuple("0123456789")
SMOKE = MODELS.get(NAME).spec.smoke_changes()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pretrained, "DIRECTORY", tmp_path)
    return tmp_path


def test_weights_and_card_survive(directory: Path) -> None:
    trained = narrow(NAME, reconstruction=True).eval()
    files = pretrained.save_pretrained(trained, "# card\n", directory)
    assert [path.name for path in files] == [f"{NAME}.safetensors", f"{NAME}.decoder.safetensors", f"{NAME}.md"]
    assert list_pretrained() == [NAME]
    assert model_card(NAME) == "# card\n"
    images = torch.rand(2, 1, 28, 28)
    for reconstruction in (False, True):
        loaded = create_model(NAME, pretrained=True, **SMOKE, reconstruction=reconstruction)
        assert not loaded.training
        assert_equal(loaded(images).scores, trained(images).scores)
    torch.testing.assert_close(loaded(images).reconstruction, trained(images).reconstruction, rtol=0, atol=1e-3)


def test_other_fields_are_rejected(directory: Path) -> None:
    pretrained.save_pretrained(narrow(NAME), "", directory)
    with pytest.raises(ValueError, match="classes=10, got classes=11"):
        create_model(NAME, pretrained=True, **SMOKE, classes=11)
    with pytest.raises(ValueError, match=r"types=4, widths=.*got types=16, widths="):
        create_model(NAME, pretrained=True)
    with pytest.raises(ValueError, match="no decoder"):
        create_model(NAME, pretrained=True, **SMOKE, reconstruction=True)
    with pytest.raises(ValueError, match=f"sabour2017_mnist has no pretrained weights; models with weights: {NAME}"):
        create_model("sabour2017_mnist", pretrained=True)


@pytest.mark.parametrize("name", list_pretrained())
def test_weights_of_the_package(name: str) -> None:
    """Sizes of the files, finite weights, and a card with an accuracy."""
    files = {path.name: path.stat().st_size for path in pretrained.DIRECTORY.glob(f"{name}.*")}
    assert files[f"{name}.safetensors"] < 2**20
    assert files.get(f"{name}.decoder.safetensors", 0) < 3 * 2**20
    model = create_model(name, pretrained=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    assert "test accuracy" in model_card(name)


def test_the_package_classifies_digits_that_its_network_has_not_seen() -> None:
    """Accuracy on the embedded test digits, which are excluded from its training, and their reconstructions."""
    model = create_model(NAME, pretrained=True, reconstruction=True)
    run = TrainedRun(Path(NAME), RunSpec.of(NAME), model, create_pipeline(model.recipe.augmentation), CLASSES, "ema", 0)
    batches = list(run.loader(limit_images(create_dataset("digits", "test"), 100)).epoch(0))
    images, labels = torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])
    with torch.no_grad():
        output = model(images, labels)
    assert model.is_correct(output, labels).sum() >= 98
    assert output.reconstruction is not None
    assert torch.nn.functional.mse_loss(output.reconstruction, images) < 0.03
