"""Measurements of robustness (Chen 2019): adversarial images, universal perturbations, images of an AC-GAN."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.acgan import GAN, train_acgan
from torchcaps.analysis.adversarial import AttackResult, attack, draw_attack
from torchcaps.analysis.gan import draw_generated
from torchcaps.analysis.universal import UniversalPerturbation, train_universal
from torchcaps.analysis.universal_figures import draw_universal_sizes
from torchcaps.data import ImageSet, ScalePixels
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import MeasurementCheckpoint
from torchcaps.training import TrainedRun
from torchcaps.training.errors import RunError

__all__ = [
    "GAN_FILE",
    "draw_black_box",
    "draw_gan_images",
    "draw_white_box",
    "measure_black_box",
    "measure_gan_errors",
    "measure_gan_images",
    "measure_white_box",
]

GAN_FILE = "gan.pt"
EARLY_ITERATIONS = 100  # of the generator, within which all networks fall (Chen 2019, supplement 6.2)


def _white_value(net: TrainedRun) -> float:
    """Return the value of a white pixel after preprocessing: 1, or 255/256 if bytes are divided by 256 (Chen 2019)."""
    (pixels,) = (step for step in net.pipeline.transforms(False) if isinstance(step, ScalePixels))
    return 255 / pixels.scale


def measure_black_box(
    context: MeasurementContext, source: TrainedRun, net: TrainedRun, n_images: int = 10_000, eps: int = 8
) -> dict[str, Any]:
    """Measure the accuracy under FGSM: with the gradients of another network (black box) and its own (white box).

    Args:
        context: context of the measurement.
        source: the network whose gradients the black-box attack uses.
        net: the attacked network.
        n_images: number of test images.
        eps: largest change of a pixel, in grey levels of 255.
    """
    batch = context.test_batch(net, n_images)
    white = _white_value(net)
    options: dict[str, Any] = {"eps": eps / 255 * white, "high": white, "progress": context.progress}
    black_box = attack(net.model, batch.images, batch.labels, source=source.model, **options)
    white_box = attack(net.model, batch.images, batch.labels, **options)
    n = len(batch.labels)
    return {
        "clean": 100 * black_box.clean_accuracy,
        "clean_images": n,
        "attacked": 100 * black_box.accuracy,
        "attacked_images": n,
        "white_box": 100 * white_box.accuracy,
        "white_box_images": n,
        "most_predicted": 100 * black_box.top_fraction,
        **result_to_dict(black_box),
    }


def draw_black_box(measurements: Mapping[str, Measurement], results: Results, out: Path) -> None:
    """Draw the accuracies before and after the attack, and the histogram of predicted classes."""
    attacks = _load_results(AttackResult, measurements, results)
    if attacks:
        draw_attack(attacks, out, results.title)


def measure_white_box(
    context: MeasurementContext,
    net: TrainedRun,
    eps: int = 32,
    iterations: int = 1_000,
    interval: int = 50,
    n_train_images: int = 10_000,
    n_images: int = 10_000,
    objective: Literal["random_class", "untargeted"] = "random_class",
) -> dict[str, Any]:
    """Train a generator of one perturbation for all images against a network (Chen 2019, supplement 6.2).

    ``attacked`` is the accuracy at the end, ``attacked_early`` that after at most 100 iterations.

    Args:
        context: context of the measurement.
        net: the attacked network.
        eps: largest change of a pixel, in grey levels of 255.
        iterations: training steps of the generator.
        interval: steps between evaluations.
        n_train_images: number of training images that the generator sees.
        n_images: number of test images.
        objective: objective of the generator, see `torchcaps.analysis.universal.train_universal`.
    """
    options = {"objective": objective, "eps": eps, "iterations": iterations, "interval": interval}
    options |= {"n_train_images": n_train_images, "n_images": n_images, "net": f"{net.spec.identity_hash()} {net.step}"}
    checkpoint = MeasurementCheckpoint(context.directory / "generator.pt", options)

    def on_step(state: Callable[[], dict[str, Any]]) -> None:
        if checkpoint.due:
            checkpoint.save(state())

    training = context.batch(net, net.spec.recipe.data, n_train_images, "train", **net.spec.data_options)
    test = context.test_batch(net, n_images)
    white = _white_value(net)
    result = train_universal(
        net.model,
        training.images,
        training.labels,
        test.images,
        test.labels,
        eps=eps / 255 * white,
        iterations=iterations,
        eval_interval=interval,
        seed=context.seed,
        high=white,
        objective=objective,
        progress=context.progress,
        state=checkpoint.load(),
        on_step=on_step,
    )
    checkpoint.remove()
    early = max(index for index, iteration in enumerate(result.iterations) if iteration <= EARLY_ITERATIONS)
    n = len(test.labels)
    return {
        "clean": 100 * result.clean_accuracy,
        "clean_images": n,
        "attacked": 100 * result.accuracy[-1],
        "attacked_images": n,
        "attacked_early": 100 * result.accuracy[early],
        "attacked_early_images": n,
        "noise": 100 * result.random_noise_accuracy,
        "noise_images": n,
        **result_to_dict(result),
    }


def draw_white_box(
    measurements: Mapping[tuple[str, str], Mapping[int, Measurement]], results: Results, out: Path
) -> None:
    """Draw the accuracy over the generator's iterations for each size, and the perturbations.

    Args:
        measurements: by label of the network and objective, and by size.
        results: the results.
        out: path of the figure.
    """
    networks = {
        f"{name},\n{objective}": _load_results(
            UniversalPerturbation, {f"{eps} levels": measurement for eps, measurement in sizes.items()}, results
        )
        for (name, objective), sizes in measurements.items()
    }
    networks = {name: sizes for name, sizes in networks.items() if sizes}
    if networks:
        by_objective: dict[str, list[str]] = {}
        for name in networks:
            by_objective.setdefault(name.split("\n")[1], []).append(name)
        draw_universal_sizes(networks, out, results.title, list(by_objective.values()))


def _load_results(cls: type[Any], measurements: Mapping[str, Measurement], results: Results) -> dict[str, Any]:
    """Return the analysis results of the measurements that have run, by label."""
    numbers = {name: results.first(measurement) for name, measurement in measurements.items()}
    return {name: result_from_dict(cls, n) for name, n in numbers.items() if n is not None}


def measure_gan_images(
    context: MeasurementContext,
    n_images: int = 60_000,
    epochs: int = 5,
    images_per_class: int = 400,
    width: float = 1.0,
    n_shown: int = 8,
) -> dict[str, Any]:
    """Train an AC-GAN on MNIST and keep images that it generates after each epoch, as bytes, in ``GAN_FILE``.

    The file is also the checkpoint of the training.

    Args:
        context: context of the measurement.
        n_images: number of training images.
        epochs: epochs of training.
        images_per_class: number of generated images per class and epoch.
        width: factor on the number of channels.
        n_shown: number of images per class and epoch that the record keeps for the figure.
    """
    dataset = context.dataset("mnist", "train", n_images)
    batch = dataset.get_batch(torch.arange(len(dataset)))
    options = {"n_images": n_images, "images_per_class": images_per_class, "width": width, "seed": context.seed}
    checkpoint = MeasurementCheckpoint(context.directory / GAN_FILE, options)
    state = checkpoint.load()
    generated: dict[str, Tensor] = {} if state is None else state["generated"]

    def on_step(gan_state: Callable[[], dict[str, Any]]) -> None:
        if checkpoint.due:
            checkpoint.save({"gan": gan_state(), "generated": generated})

    def on_epoch(epoch: int, gan: GAN) -> None:
        images, _ = gan.generate(images_per_class, seed=1_000 + context.seed)
        generated[f"epoch{epoch}"] = (255 * images).round().to(torch.uint8)
        checkpoint.save({"gan": gan.state_dict(), "generated": generated})

    train_acgan(
        batch.images.float() / 255,
        batch.labels,
        epochs=epochs,
        seed=context.seed,
        batch_size=min(100, len(batch.labels)),
        width=width,
        on_epoch=on_epoch,
        state=None if state is None else state["gan"],
        progress=context.progress,
        on_step=on_step,
    )
    shown = {
        f"shown{epoch}": generated[f"epoch{epoch}"].unflatten(0, (10, -1))[:, :n_shown]
        for epoch in range(1, epochs + 1)
    }
    return {"n": 10 * images_per_class, "epochs": epochs, **shown}


def measure_gan_errors(context: MeasurementContext, **nets: TrainedRun) -> dict[str, Any]:
    """Measure the errors of networks, trained on real digits, on the images that the GAN generated after each epoch."""
    epochs = context.dependencies["gan"]["epochs"]
    path = context.directory.parent / f"chen2019-gan-seed{context.seed}" / GAN_FILE
    state = MeasurementCheckpoint(path, None).load()
    if state is None or f"epoch{epochs}" not in state["generated"]:
        raise RunError(f"{path} does not have the GAN's images: remove it to train the GAN again")
    numbers: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        pixels = state["generated"][f"epoch{epoch}"]
        labels = torch.arange(10).repeat_interleave(len(pixels) // 10)
        for name, net in nets.items():
            loader = net.loader(ImageSet("gan", "test", pixels, labels, net.classes))
            with torch.no_grad():
                correct = sum(int(net.model.is_correct(net.model(b.images), b.labels).sum()) for b in loader.epoch(0))
            numbers[f"{name} {epoch}"] = 100 * (len(labels) - correct) / len(labels)
            numbers[f"{name} {epoch}_images"] = len(labels)
            context.progress()
    return numbers


def draw_gan_images(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw generated images after each epoch."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    generated = {}
    for epoch in range(1, int(numbers["epochs"]) + 1):
        images = torch.as_tensor(numbers[f"shown{epoch}"]).float() / 255  # [classes, n, 1, 28, 28]
        generated[f"epoch {epoch}"] = images.flatten(0, 1), torch.arange(len(images)).repeat_interleave(images.shape[1])
    draw_generated(generated, out, results.title)
