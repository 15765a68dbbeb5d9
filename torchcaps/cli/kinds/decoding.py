"""What a decoder shows."""

from collections.abc import Callable

import torch

from torchcaps import analysis
from torchcaps._core.registry import check_name
from torchcaps.analysis.adversarial import label_sets
from torchcaps.analysis.attacks import judge
from torchcaps.cli.kinds.job import PIECE, Columns, Found, Job, between, decimal, drawn, interval, pieces, whole
from torchcaps.cli.runs import share
from torchcaps.data import Batch
from torchcaps.training.inference import Trained

__all__ = ["perturbation", "reconstruction", "segmentation"]


def perturbation(job: Job) -> Found:
    """Move each dimension of a class capsule."""
    run = job.one
    batch = job.batch(run)
    tick = job.tick("perturbation", pieces(len(batch.images)) + 1)
    place, number = _recognised(job, run, batch, tick)
    image, label = batch.images[place : place + 1], torch.tensor([number])
    found = analysis.perturb(job.model, image, label, progress=tick)
    ends = found.decoded[0][:, [0, -1]] - found.unperturbed[0]  # [D, 2, C, H, W]
    changes = ends.abs().flatten(1).mean(1).tolist()
    numbers = {str(dim): {"change": change} for dim, change in zip(found.dims.tolist(), changes, strict=True)}
    low, high = float(found.amounts[0]), float(found.amounts[-1])
    where = int(batch.indices[place])
    note = f"Image {where:,}, class {run.classes[number]}; each dimension moved by {low:g} to {high:g}."
    columns: Columns = {"change": ("mean change of a pixel at the ends", decimal(4))}
    draw = drawn(analysis.draw_perturbation, found, job.title, classes=run.classes)
    also = {"image": where, "class": run.classes[number], "amounts": found.amounts.tolist()}
    return Found("what each dimension does", 1, "dimension", columns, numbers, draw, (note,), also)


def _recognised(job: Job, run: Trained, batch: Batch, tick: Callable[[], None]) -> tuple[int, int]:
    """Return the place of the first image that is recognised, of the class asked for, and the number of its class."""
    hot = label_sets(run.model, batch.labels)
    wanted = job.options["class"]
    number = None if wanted is None else run.classes.index(check_name(wanted, run.classes, "--class"))
    there = torch.ones(len(hot), dtype=torch.bool) if number is None else hot[:, number] == 1
    if not bool(there.any()):
        raise ValueError(f"none of these {len(hot):,} images is of the class {wanted}: give more by --images")
    right = judge(run.model, batch.images, batch.labels, PIECE, tick)[0]
    place = int((there & right if bool((there & right).any()) else there).to(torch.uint8).argmax())
    return place, int(hot[place].argmax()) if number is None else number


def reconstruction(job: Job) -> Found:
    """Decode images by label and by prediction."""
    run = job.one
    batch = job.batch(run)
    n = len(batch.images)
    tick = job.tick("reconstruction", pieces(n))
    found = analysis.reconstruct(job.model, batch.images, batch.labels, batch.targets, PIECE, tick)
    numbers = {}
    for name, which in (("yes", found.right), ("no", ~found.right)):
        errors = (found.error_by_label, found.error_by_prediction)
        means = [float(error[which].mean()) if bool(which.any()) else None for error in errors]
        numbers[name] = {"images": int(which.sum()), "error_by_label": means[0], "error_by_prediction": means[1]}
    columns: Columns = {
        "images": ("images", whole),
        "error_by_label": ("error, by label", decimal(2)),
        "error_by_prediction": ("error, by prediction", decimal(2)),
    }
    accuracy = numbers["yes"]["images"] / n
    notes = (
        f"{share(accuracy)} recognised, {between(interval(accuracy, n))}.",
        "Errors are squared differences, summed over an image; the mean over images.",
    )
    also = {"accuracy": accuracy, "interval": interval(accuracy, n)}
    draw = drawn(analysis.draw_reconstructions, found, job.title)
    return Found("decodes by label and by prediction", n, "recognised", columns, numbers, draw, notes, also)


def segmentation(job: Job) -> Found:
    """Tell overlapping objects apart."""
    run = job.one
    batch = job.batch(run)
    n, more = len(batch.images), job.given(threshold="threshold")
    tick = job.tick("segmentation", pieces(n))
    found = analysis.segment(
        job.model, batch.images, batch.labels, batch.targets, batch_size=PIECE, seed=job.options.seed, progress=tick,
        **more,
    )  # fmt: skip
    means = {
        "decoded by label": found.mean_by_label,
        "decoded by prediction": found.mean_by_prediction,
        "all ink given to all": found.mean_baseline,
    }
    accuracy = float(found.right.double().mean())
    notes = (
        f"A class that is neither there nor predicted inks {share(found.mean_absent_ink)} of the image's ink.",
        f"{share(accuracy)} recognised, {between(interval(accuracy, n))}; ink is over {found.threshold:g}.",
    )
    also = {"absent_ink": found.mean_absent_ink, "accuracy": accuracy, "threshold": found.threshold}
    numbers = {name: {"iou": mean} for name, mean in means.items()}
    columns: Columns = {"iou": ("mean IoU", decimal(3))}
    draw = drawn(analysis.draw_segmentation, found, job.title)
    return Found("overlapping objects told apart", n, "masks", columns, numbers, draw, notes, also)
