"""How far recognition holds."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps import analysis
from torchcaps.analysis.affine import AXES
from torchcaps.cli.kinds.job import PIECE, Columns, Found, Job, between, drawn, interval, pieces
from torchcaps.cli.runs import share
from torchcaps.data import ImageSet
from torchcaps.training.inference import load_run

__all__ = ["affine", "attack", "gan", "universal"]

MADE = 400  # images that a GAN makes of each class: Chen 2019, section 4.2
LEARNT = 10_000  # images that a universal change is learnt from


def affine(job: Job) -> Found:
    """Measure recognition under affine transformations."""
    found: dict[str, analysis.AffineSweep] = {}
    for name, run in job.runs.items():
        batch = job.batch(run)
        tick = job.tick(name, 36 * pieces(len(batch.images)))
        found[name] = analysis.affine_sweep(run.model, batch.images, batch.labels, batch_size=PIECE, progress=tick)
    numbers: dict[str, dict[str, Any]] = {}
    for name, result in found.items():
        for n, kind in enumerate(result.kinds):
            accuracy, amounts = result.accuracy[n], result.amounts[n]
            worst = min(range(len(accuracy)), key=accuracy.__getitem__)
            numbers[kind if len(found) == 1 else f"{name}, {kind}"] = {
                "untouched": accuracy[amounts.index(1.0 if kind == "scale" else 0.0)],
                "mean": sum(accuracy) / len(accuracy),
                "lowest": accuracy[worst],
                "interval": (result.low[n][worst], result.high[n][worst]),
                "at": amounts[worst],
                "amounts": amounts,
                "accuracy": accuracy,
                "low": result.low[n],
                "high": result.high[n],
            }
    columns: Columns = {
        "untouched": ("untouched", share),
        "mean": ("mean", share),
        "lowest": ("lowest", share),
        "interval": ("95 % interval", between),
        "at": ("at", lambda amount: f"{amount:g}"),
    }
    units = "; ".join(f"{AXES[kind][0]}: {AXES[kind][1]}" for kind in next(iter(found.values())).kinds)
    draw = drawn(analysis.draw_affine, found, job.title)
    title = "recognition of transformed images"
    return Found(title, len(job.dataset), "transformation", columns, numbers, draw, (f"Amounts: {units}.",))


def attack(job: Job) -> Found:
    """Attack networks, each by its own gradients or by those of another run."""
    source = None if job.options.source is None else load_run(job.options.source)
    attacker = None if source is None else job.network(source)
    more = job.given(method="method", steps="iterations")
    if "steps" in more and more.get("method", "fgsm") == "fgsm":
        raise ValueError("--iterations is for --method bim or pgd: fgsm makes one step")
    levels = 8.0 if job.options.eps is None else job.options.eps
    found: dict[str, analysis.AttackResult] = {}
    for name, run in job.runs.items():
        network = job.network(run)
        batch = job.pixels(network)
        tick = job.tick(name, 3 * pieces(len(batch.images)))  # before, the attack, after
        found[name] = analysis.attack(
            network, batch.images, batch.labels, eps=levels / 255, source=attacker, seed=job.options.seed,
            batch_size=PIECE, progress=tick, **more,
        )  # fmt: skip
    numbers = {
        name: {
            "clean": result.clean_accuracy,
            "attacked": result.accuracy,
            "interval": interval(result.accuracy, result.n_images),
            "most_predicted": job.one.classes[int(result.predicted.argmax())],
            "of_the_images": result.top_share,
        }
        for name, result in found.items()
    }
    columns: Columns = {
        "clean": ("clean", share),
        "attacked": ("attacked", share),
        "interval": ("95 % interval", between),
        "most_predicted": ("most predicted", str),
        "of_the_images": ("of the images", share),
    }
    notes = tuple(
        f"{name} takes nearly all images for one class: its accuracy is the share of that class."
        for name, result in found.items()
        if result.degenerate
    )
    first = next(iter(found.values()))
    by = "own gradients" if source is None else f"gradients of {source.path}"
    title = f"{first.method} of {levels:g} levels out of 255 by {by}"
    draw = drawn(analysis.draw_attack, found, f"{job.title}: {title}" if job.title else title)
    also = {"method": first.method, "eps": levels, "source": None if source is None else str(source.path)}
    return Found(title, first.n_images, "run", columns, numbers, draw, notes, also)


def universal(job: Job) -> Found:
    """Train one change that misleads a network on any image."""
    more = job.given(iterations="iterations")
    iterations = more.setdefault("iterations", 1_000)
    every = max(1, iterations // 20)
    levels = 32.0 if job.options.eps is None else job.options.eps
    found: dict[str, analysis.Universal] = {}
    for name, run in job.runs.items():
        network = job.network(run)
        test = job.pixels(network)
        own = job.pixels(network, job.training_set(run, job.options.train_images or LEARNT))
        size = min(PIECE, len(own.images))
        measured = 1 + math.ceil(iterations / every) + 3
        tick = job.tick(name, iterations + measured * math.ceil(len(test.images) / size))
        found[name] = analysis.train_universal(
            network, own.images, own.labels, test.images, test.labels, eps=levels / 255, every=every,
            seed=job.options.seed, batch_size=size, progress=tick, **more,
        )  # fmt: skip
    numbers = {
        name: {
            "clean": result.clean_accuracy,
            "noise": result.random_noise_accuracy,
            "attacked": result.accuracy[-1],
            "interval": interval(result.accuracy[-1], result.n_images),
            "iterations": result.iterations,
            "accuracy": result.accuracy,
        }
        for name, result in found.items()
    }
    columns: Columns = {
        "clean": ("clean", share),
        "noise": ("random signs", share),
        "attacked": ("attacked", share),
        "interval": ("95 % interval", between),
    }
    title = f"one change of {levels:g} levels out of 255 for all images"
    draw = drawn(analysis.draw_universal, found, f"{job.title}: {title}" if job.title else title)
    n_images = next(iter(found.values())).n_images
    return Found(title, n_images, "run", columns, numbers, draw, also={"eps": levels})


def gan(job: Job) -> Found:
    """Train a GAN on a run's images, and test networks on what it makes."""
    dataset = job.training_set(job.one, job.options.train_images)
    learnt = dataset.get_batch(torch.arange(len(dataset)))
    networks = {name: job.network(run) for name, run in job.runs.items()}
    first = next(iter(networks.values()))
    classes, options = job.one.classes, job.options
    each = max(1, math.ceil((options.images or MADE * len(classes)) / len(classes)))
    more = {"epochs": 5, **job.given(epochs="epochs", width="width")}
    size = min(PIECE, len(dataset))
    tests = len(networks) * pieces(each * len(classes))
    tick = job.tick("GAN", more["epochs"] * (len(dataset) // size + tests))
    found: dict[int, analysis.Generalisation] = {}
    made: dict[str, tuple[Tensor, Tensor]] = {}

    def on_epoch(epoch: int, net: analysis.GAN) -> None:
        digits, labels = net.generate(each, seed=options.seed + 1_000)
        images = ImageSet("gan", "test", (255 * digits).round().to(torch.uint8), labels, classes)
        pixels = job.pixels(first, images).images
        found[epoch] = analysis.generalisation(networks, pixels, labels, PIECE, tick)
        shown = torch.cat([(labels == number).nonzero()[:4, 0] for number in range(len(classes))])
        made[f"epoch {epoch}"] = (pixels[shown], labels[shown])

    analysis.train_acgan(
        learnt.images / 255, learnt.labels, seed=options.seed, batch_size=size, classes=len(classes), on_epoch=on_epoch,
        progress=tick, **more,
    )  # fmt: skip
    numbers = {
        name: {str(epoch): result.errors[n] / 100 for epoch, result in found.items()} for n, name in enumerate(networks)
    }
    columns: Columns = {str(epoch): (f"epoch {epoch}", share) for epoch in found}
    last = list(found.values())[-1]
    notes = ("An error may be the network's or the GAN's: only differences between networks say something of them.",)

    def draw(out: Path) -> list[Path]:
        images = out.with_name(f"{out.stem}-images{out.suffix}")
        analysis.draw_generalisation(found, out, job.title)
        analysis.draw_generated(made, images, f"made of {len(dataset):,} images of {dataset.name}")
        return [out, images]

    title = "error on images that a GAN made, by epochs that it was trained for"
    also = {"agree": last.agree / 100, "train_images": len(dataset), "data": dataset.name, "split": dataset.split}
    made_of = f"made of {dataset.name}, {dataset.split}"
    return Found(title, last.n_images, "run", columns, numbers, draw, notes, also, made_of)
