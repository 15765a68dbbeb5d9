"""How routing works."""

from typing import Any

from torchcaps import analysis
from torchcaps.cli.kinds.job import Columns, Found, Job, decimal, drawn, pieces, whole
from torchcaps.cli.runs import share

__all__ = ["couplings", "dead", "logits"]


def logits(job: Job) -> Found:
    """Measure how much logits still change."""
    found: dict[str, analysis.LogitChange] = {}
    for name, run in job.runs.items():
        tick, more = job.tick(name, None), job.given(iterations="iterations")
        found[name] = analysis.logit_change(run.model, job.batch(run).images, progress=tick, **more)
    numbers: dict[str, dict[str, Any]] = {}
    for name, result in found.items():
        for n, layer in enumerate(result.layers):
            for what, values in ((result.measured[n], result.change[n]), ("couplings", result.coupling_change[n])):
                row = {str(step): value for step, value in enumerate(values.tolist(), 1)}
                numbers[f"{name}, {layer}: {what}"] = row
    longest = max(len(row) for row in numbers.values())
    columns: Columns = {str(step): (str(step), lambda value: f"{value:.2e}") for step in range(1, longest + 1)}
    trained = {
        layer: count for result in found.values() for layer, count in zip(result.layers, result.trained, strict=True)
    }
    note = "Trained with " + ", ".join(f"{count} iterations ({layer})" for layer, count in trained.items()) + "."
    draw = drawn(analysis.draw_logit_change, found, job.title)
    title = "mean change in each iteration of routing"
    return Found(title, len(job.dataset), "what changes", columns, numbers, draw, (note,))


def couplings(job: Job) -> Found:
    """Measure how evenly couplings are spread, and where they lie."""
    batch = job.batch(job.one)
    tick = job.tick("couplings", pieces(len(batch.images), 32))
    found = analysis.coupling_maps(job.model, batch.images, batch.labels, keep=0, progress=tick)
    numbers, notes = {}, []
    for layer in found.layers:
        values = [] if layer.entropy is None else layer.entropy.mean(0).tolist()
        numbers[layer.name] = {str(step): value for step, value in enumerate(values, 1)}
        notes += [f"{layer.name}: {layer.why_no_entropy}."] if layer.entropy is None else []
    if found.layers[-1].maps is None:
        notes.append(f"No maps of {found.layers[-1].name}: {found.layers[-1].why_no_maps}.")
    longest = max(len(row) for row in numbers.values())
    columns: Columns = {str(step): (f"iteration {step}", decimal(4)) for step in range(1, longest + 1)}
    draw = drawn(analysis.draw_couplings, found, job.title, classes=job.one.classes)
    title = "entropy of couplings (1: even, 0: one gets all)"
    return Found(title, len(batch.images), "layer", columns, numbers, draw, tuple(notes))


def dead(job: Job) -> Found:
    """Count capsules that never wake up."""
    batch = job.batch(job.one)
    tick, more = job.tick("dead", pieces(len(batch.images), 32)), job.given(threshold="threshold")
    found = analysis.dead_capsules(job.model, batch.images, progress=tick, **more)
    numbers, notes = {}, []
    for layer in found.layers:
        if layer.peak is None:
            numbers[layer.name] = {}
            notes.append(f"{layer.name}: {layer.why}.")
            continue
        types = layer.n_dead_types if layer.n > layer.peak.shape[-1] else None
        row = {"capsules": layer.n, "dead": layer.n_dead, "share": layer.share, "dead_types": types}
        numbers[layer.name] = {**row, "measure": layer.measure}
    columns: Columns = {
        "capsules": ("capsules", whole),
        "dead": ("dead", whole),
        "share": ("share", share),
        "dead_types": ("types dead everywhere", whole),
        "measure": ("measured by", str),
    }
    title = f"capsules that never get over {found.threshold:g}"
    draw = drawn(analysis.draw_dead, found, job.title)
    return Found(title, found.n_images, "layer", columns, numbers, draw, tuple(notes), {"threshold": found.threshold})
