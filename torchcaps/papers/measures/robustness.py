"""Digits that are not quite those of the training set: attacked ones, and those of a GAN."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.acgan import GAN, train_acgan
from torchcaps.analysis.adversarial import AttackResult, attack, draw_attack
from torchcaps.analysis.gan import draw_generated
from torchcaps.analysis.universal import UniversalPerturbation, train_universal
from torchcaps.analysis.universal_figures import draw_universal_sizes
from torchcaps.data import ImageSet, ScalePixels
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.training import Trained
from torchcaps.training.errors import RunError

__all__ = [
    "GAN_FILE",
    "black_box",
    "draw_black_box",
    "draw_gan_images",
    "draw_white_box",
    "gan_errors",
    "gan_images",
    "white_box",
]

GAN_FILE = "gan.pt"


def _top(net: Trained) -> float:
    """Return what a white pixel is to a network: 1, or 255/256 where bytes are divided by 256 (Chen 2019)."""
    (pixels,) = (step for step in net.pipeline.transforms(False) if isinstance(step, ScalePixels))
    return 255 / pixels.scale


def black_box(context: Context, source: Trained, net: Trained, images: int = 10_000, eps: int = 8) -> dict[str, Any]:
    """Attack a network by images that were made against another: FGSM of ``eps`` levels out of 255."""
    batch = context.test_batch(net, images)
    top = _top(net)
    found = attack(
        net.model,
        batch.images,
        batch.labels,
        eps=eps / 255 * top,
        source=source.model,
        high=top,
        progress=context.tick,
    )
    own = attack(net.model, batch.images, batch.labels, eps=eps / 255 * top, high=top, progress=context.tick)
    n = len(batch.labels)
    return {
        "clean": 100 * found.clean_accuracy,
        "clean_images": n,
        "attacked": 100 * found.accuracy,
        "attacked_images": n,
        "white_box": 100 * own.accuracy,
        "white_box_images": n,
        "most_predicted": 100 * found.top_fraction,
        **result_to_dict(found),
    }


def draw_black_box(measures: Mapping[str, Measure], results: Results, out: Path) -> None:
    """Draw accuracies before and after, and what was predicted."""
    found = _revived(AttackResult, measures, results)
    if found:
        draw_attack(found, out, results.title)


def white_box(
    context: Context,
    net: Trained,
    eps: int = 32,
    iterations: int = 1_000,
    every: int = 50,
    learnt: int = 10_000,
    images: int = 10_000,
) -> dict[str, Any]:
    """Train a generator of one perturbation for all images against a network: Chen 2019, supplement 6.2."""
    options = {"eps": eps, "iterations": iterations, "every": every, "learnt": learnt, "images": images}
    kept = Kept(context.folder / "generator.pt", {**options, "net": f"{net.spec.identity_hash()} {net.step}"})

    def on_step(state: Callable[[], dict[str, Any]]) -> None:
        if kept.due:
            kept.write(state())

    own = context.batch(net, net.spec.recipe.data, learnt, "train", **net.spec.data_options)
    test = context.test_batch(net, images)
    top = _top(net)
    found = train_universal(
        net.model,
        own.images,
        own.labels,
        test.images,
        test.labels,
        eps=eps / 255 * top,
        iterations=iterations,
        eval_interval=every,
        seed=context.seed,
        high=top,
        progress=context.tick,
        state=kept.read(),
        on_step=on_step,
    )
    kept.clear()
    n = len(test.labels)
    return {
        "clean": 100 * found.clean_accuracy,
        "clean_images": n,
        "attacked": 100 * found.accuracy[-1],
        "attacked_images": n,
        "noise": 100 * found.random_noise_accuracy,
        "noise_images": n,
        **result_to_dict(found),
    }


def draw_white_box(measures: Mapping[str, Mapping[int, Measure]], results: Results, out: Path) -> None:
    """Draw accuracy over the generator's iterations for every size, and the perturbations."""
    found = {
        name: _revived(UniversalPerturbation, {f"{eps} levels": measure for eps, measure in sizes.items()}, results)
        for name, sizes in measures.items()
    }
    there = {name: sizes for name, sizes in found.items() if sizes}
    if there:
        draw_universal_sizes(there, out, results.title)


def _revived(kind: type[Any], measures: Mapping[str, Measure], results: Results) -> dict[str, Any]:
    records = {name: results.first(measure) for name, measure in measures.items()}
    return {name: result_from_dict(kind, record["found"]) for name, record in records.items() if record is not None}


def gan_images(
    context: Context, images: int = 60_000, epochs: int = 5, per_class: int = 400, width: float = 1.0, shown: int = 8
) -> dict[str, Any]:
    """Train an AC-GAN on digits, and keep what it makes after every epoch, as bytes.

    It is kept every minute and after each epoch, and goes on from there where it was killed.
    """
    dataset = context.dataset("mnist", "train", images)
    batch = dataset.get_batch(torch.arange(len(dataset)))
    options = {"images": images, "per_class": per_class, "width": width, "seed": context.seed}
    kept = Kept(context.folder / GAN_FILE, options)
    left = kept.read()
    made: dict[str, Tensor] = {} if left is None else left["made"]

    def on_step(state: Callable[[], dict[str, Any]]) -> None:
        if kept.due:
            kept.write({"gan": state(), "made": made})

    def on_epoch(epoch: int, gan: GAN) -> None:
        digits, _ = gan.generate(per_class, seed=1_000 + context.seed)
        made[f"epoch{epoch}"] = (255 * digits).round().to(torch.uint8)
        kept.write({"gan": gan.state_dict(), "made": made})

    train_acgan(
        batch.images.float() / 255,
        batch.labels,
        epochs=epochs,
        seed=context.seed,
        batch_size=min(100, len(batch.labels)),
        width=width,
        on_epoch=on_epoch,
        state=None if left is None else left["gan"],
        progress=context.tick,
        on_step=on_step,
    )
    few = {f"shown{epoch}": made[f"epoch{epoch}"].unflatten(0, (10, -1))[:, :shown] for epoch in range(1, epochs + 1)}
    return {"n": 10 * per_class, "epochs": epochs, **few}


def gan_errors(context: Context, **nets: Trained) -> dict[str, Any]:
    """Test networks, which have seen real digits only, on what the GAN made after every epoch: the same for all."""
    gan = context.records["gan"]
    file = context.folder.parent / f"chen2019-gan-seed{context.seed}" / GAN_FILE
    state = Kept(file, None).read()
    if state is None or f"epoch{gan['epochs']}" not in state["made"]:
        raise RunError(f"{file} does not have the GAN's images: remove it, and the GAN is trained again")
    found: dict[str, Any] = {}
    for epoch in range(1, gan["epochs"] + 1):
        pixels = state["made"][f"epoch{epoch}"]
        labels = torch.arange(10).repeat_interleave(len(pixels) // 10)
        for name, net in nets.items():
            loader = net.loader(ImageSet("gan", "test", pixels, labels, net.classes))
            with torch.no_grad():
                wrong = sum(int((~net.model.is_correct(net.model(b.images), b.labels)).sum()) for b in loader.epoch(0))
            found[f"{name} {epoch}"] = 100 * wrong / len(labels)
            found[f"{name} {epoch}_images"] = len(labels)
            context.tick()
    return found


def draw_gan_images(measure: Measure, results: Results, out: Path) -> None:
    """Draw some of what the GAN made after every epoch."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    made = {}
    for epoch in range(1, int(found["epochs"]) + 1):
        images = torch.as_tensor(found[f"shown{epoch}"]).float() / 255  # [classes, n, 1, 28, 28]
        made[f"epoch {epoch}"] = images.flatten(0, 1), torch.arange(len(images)).repeat_interleave(images.shape[1])
    draw_generated(made, out, results.title)
