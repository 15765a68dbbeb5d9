"""Errors of classifiers on generated digits."""

from pathlib import Path

import pytest
import torch

from tests.models.narrow import batch, narrow
from torchcaps.analysis.acgan import GAN
from torchcaps.analysis.gan import (
    GanOptions,
    Generalization,
    draw_generalization,
    draw_generated,
    measure_generalization,
)


def test_errors_are_percentages_of_the_same_images_for_every_model() -> None:
    first, second = narrow("chen2019_fc_mnist"), narrow("chen2019_lenet")
    images, _, _ = batch(first, 16)
    with torch.no_grad():
        labels = first.eval()(images).scores.argmax(1)
        other = second.eval()(images).scores.argmax(1)
    labels[:4] = (labels[:4] + 1) % 10  # four of sixteen are now incorrect for the first
    result = measure_generalization({"FC": first, "LeNet": second}, images, labels, batch_size=5)
    assert result.models == ("FC", "LeNet")
    assert result.errors[0] == 25
    assert result.errors[1] == 100 * float((other != labels).double().mean())
    agree = (other == labels) & (torch.arange(16) >= 4)
    assert result.agree == 100 * float(agree.double().mean())
    assert result.n_images == 16


def test_invalid_arguments_are_rejected() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model, 4)
    first, second = (Generalization((name,), (1.0,), 5, 0.0) for name in "ab")
    for argument, call in {
        "models": lambda: measure_generalization({}, images, labels),
        "images and labels .*4 and 1": lambda: measure_generalization({"LeNet": model}, images, labels[:1]),
        "generated": lambda: draw_generated({}, "none.png"),
        "results": lambda: draw_generalization({}, "none.png"),
        "results .*a.*b": lambda: draw_generalization({1: first, 2: second}, "none.png"),
        "epochs .*0": lambda: GanOptions(epochs=0),
        "images_per_class .*0": lambda: GanOptions(images_per_class=0),
        "max_train_images .*0": lambda: GanOptions(max_train_images=0),
    }.items():
        with pytest.raises(ValueError, match=argument):
            call()


def test_figures(tmp_path: Path) -> None:
    gan = GAN(width=0.03)
    draw_generated({"epoch 1": gan.generate(2), "epoch 2": gan.generate(4)}, tmp_path / "generated.png", "AC-GAN")
    rows = {n: Generalization(("CNN", "FC"), (20.0 / n**4, 0.0), 4000, 80.0) for n in (1, 2, 3)}
    draw_generalization(rows, tmp_path / "errors.svg", "Generated digits")
    assert (tmp_path / "generated.png").stat().st_size > 5_000
    assert "FC" in (tmp_path / "errors.svg").read_text()
