"""Names that other tools use for flags of this one, for the suggestions in errors."""

import difflib
from collections.abc import Collection

__all__ = ["similar_flags"]

# For each flag, other names of it; a flag with a value is suggested as such. Names are compared without dashes.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "--lr": ("learning-rate", "learningrate", "base-lr", "max-lr", "eta", "initial-lr"),
    "--lr-schedule": ("scheduler", "lr-scheduler", "schedule", "sched", "lr-policy"),
    "--epochs": ("epoch", "n-epochs", "num-epochs", "max-epochs", "nepochs", "train-epochs", "e"),
    "--steps": ("max-steps", "num-steps", "iterations", "iters", "max-iter"),
    "--batch-size": ("batch", "bs", "batchsize", "train-batch-size", "mini-batch", "minibatch", "b"),
    "--device cuda": ("gpu", "cuda", "use-gpu", "use-cuda"),
    "--device cpu": ("cpu", "no-cuda", "no-gpu"),
    "--device": ("accelerator", "dev"),
    "--devices": ("gpus", "n-gpus", "num-gpus", "nproc", "world-size", "num-processes", "nproc-per-node"),
    "--model": ("arch", "architecture", "net", "network", "model-name", "m", "a"),
    "--data": ("dataset", "data-set", "train-data", "images", "input", "folder", "d"),
    "--data-dir": ("data-path", "data-root", "root", "datadir", "cache-dir"),
    "--out": ("output", "output-dir", "out-dir", "outdir", "save-dir", "log-dir", "logdir", "run-dir", "o"),
    "--image-size": ("img-size", "imgsz", "input-size", "resolution", "size", "resize", "imagesize", "crop-size"),
    "--num-workers": ("workers", "n-workers", "loader-workers", "dataloader-workers", "j"),
    "--num-threads": ("threads", "n-threads", "n-jobs", "cpus"),
    "--optimizer": ("optim", "optimiser", "opt", "solver"),
    "--weight-decay": ("wd", "decay", "l2", "weightdecay"),
    "--augmentation": ("aug", "augment", "transforms", "augmentations", "preprocessing"),
    "--val-fraction": ("val-split", "validation-split", "val-size", "val-ratio", "validation-fraction"),
    "--max-minutes": ("time", "max-time", "time-limit", "timeout", "minutes", "max-hours", "budget"),
    "--early-stopping-patience": ("patience", "early-stopping", "early-stop"),
    "--precision bf16-mixed": ("amp", "fp16", "half", "bf16", "mixed-precision", "autocast"),
    "--max-grad-norm": ("clip", "grad-clip", "clip-grad", "clip-norm", "gradient-clipping", "gradient-clip-val"),
    "--micro-batches": ("accumulate", "grad-accum", "accum-steps", "gradient-accumulation-steps"),
    "--resume": ("checkpoint", "ckpt", "ckpt-path", "continue", "restore"),
    "--seed": ("random-state", "random-seed", "manual-seed", "rng-seed", "s"),
    "--class-weights": ("class-weight", "weights-per-class", "balanced"),
    "--on-error": ("broken", "skip-broken", "skip-errors", "strict", "ignore-errors"),
    "--quiet": ("silent", "no-progress", "no-verbose"),
    "--json": ("as-json", "output-json", "format"),
    "--eval-weights ema": ("ema", "model-ema"),
    "--max-images": ("limit", "n-images", "num-images", "max-samples"),
    "--max-train-images": ("limit", "n-images", "num-images", "max-samples", "subset"),
    "--weights": ("checkpoint", "ckpt", "model-weights"),
    "--split": ("subset", "partition"),
    "--config": ("cfg", "conf", "config-file", "settings", "yaml", "c"),
    "--ema-decay": ("ema-momentum", "ema-rate"),
    "--compare": ("baseline", "versus", "vs"),
    "--help": ("usage", "man", "?"),
}


def similar_flags(flag: str, known: Collection[str]) -> list[str]:
    """Return up to two flags that an unknown one may mean: those with that meaning elsewhere, else similar names.

    Dashes, and the owner of a nested flag such as ``--data.size``, do not count as similar.

    Args:
        flag: the unknown flag, ``--learning-rate`` or ``-b``.
        known: the flags of the command.

    >>> similar_flags("--learning-rate", ["--lr", "--lr-schedule"]), similar_flags("--gpu", ["--device", "--epochs"])
    (['--lr'], ['--device cuda'])
    >>> similar_flags("--epohcs", ["--epochs", "--out"]), similar_flags("--bogus", ["--epochs", "--out"])
    (['--epochs'], [])
    """
    owner, _, field = flag.lower().rpartition(".")
    name = field.lstrip("-").replace("-", "")
    meant = [
        other
        for other, names in SYNONYMS.items()
        if other.partition(" ")[0] in known and name in (n.replace("-", "") for n in names)
    ]
    by_field = {other.rpartition(".")[2].lstrip("-"): other for other in known if other.rpartition(".")[0] == owner}
    close = difflib.get_close_matches(field.lstrip("-"), by_field, n=2, cutoff=0.65)
    return (meant or [by_field[other] for other in close])[:2]
