"""``torchcaps analyze``."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import FIGURE_SUFFIXES as ENDINGS
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.images import BELOW, add_data_flags, chosen_images
from torchcaps.cli.kinds import KINDS, Found, Job, Kind
from torchcaps.cli.parser import Parser
from torchcaps.cli.words import Flags
from torchcaps.training.inference import Trained, load_run
from torchcaps.training.setup import some_of

__all__ = ["analyze_command"]

DESCRIPTION = (
    "Ask a trained network what it knows: numbers, and a figure. The last word says which analysis; those with a * "
    "compare several runs. Examples: torchcaps analyze runs/capsnet_small-digits-1 perturbation --out fig.png; "
    "torchcaps analyze runs/mine-1 runs/mine-2 affine; "
    "torchcaps analyze runs/mine-1 attack --method pgd --eps 16 --source runs/mine-2"
)
# What only some kinds take, and of what type and meaning.
OWN: dict[str, tuple[Any, str]] = {
    "before_tanh": (bool, "read capsules before their tanh (attention routing)"),
    "class": (str | None, "the class whose capsule is moved (default: that of the first image that is recognised)"),
    "epochs": (int | None, "of the GAN (default: 5)"),
    "eps": (float | None, "the largest change of a pixel, in levels out of 255 (default: 8; universal: 32)"),
    "iterations": (int | None, "of routing (default: 5), of bim and pgd (10), of the generator (universal: 1000)"),
    "method": (Literal["fgsm", "bim", "pgd"] | None, "fgsm, bim or pgd (default: fgsm)"),
    "source": (str | None, "a run whose gradients mislead the others (default: each run's own)"),
    "threshold": (float | None, "of ink (segmentation, default: 0.5), of what is awake (dead, default: 0.05)"),
    "train_images": (int | None, "what the generator learns from (default: 10,000; of the GAN: all)"),
    "width": (float | None, "of the GAN: 1 is the published one (default: 1)"),
}


class _AnalyzeParser(Parser):
    """A parser whose help ends with the kinds."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help."""
        lines = []
        for name, kind in KINDS.items():
            own = ", ".join(f"--{flag.replace('_', '-')}" for flag in kind.flags)
            mark = "*" if kind.several else ""
            lines.append(f"  {name + mark:<15} {kind.about}" + (f" ({own})" if own else ""))
        return super().format_help(*args, **kwargs).rstrip("\n") + "\n\nkinds:\n" + "\n".join(lines) + "\n"


def analyze_command(words: list[str]) -> None:
    """Ask a trained network what it knows."""
    sys.path.insert(0, os.getcwd())
    parser = _AnalyzeParser(prog="torchcaps analyze", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("kind", help="one of the kinds below")
    parser.add_argument("--out", type=str | None, help="the figure, .png, .svg or .pdf (default: RUN/figures/KIND.png)")
    parser.add_argument("--images", type=int | None, help="so many, always the same ones (default: as the kind needs)")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn at random")
    parser.add_argument(
        "--weights",
        type=Literal["last", "best", "ema"] | None,
        help="last, best or average (default: as the run's recipe says)",
    )
    parser.add_argument("--num-threads", type=int | None, help="of the CPU")
    parser.add_argument("--json", action="store_true", help="for machines; no figure unless --out is given")
    add_data_flags(parser, words)
    for name, (kind, text) in OWN.items():
        default = False if kind is bool else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    flags = Flags(parser.flags, switches={"--json", "--before-tanh"}, below=BELOW, who="analyze")
    words, given = flags.read(parser, words)
    words.sort(key=lambda word: word.startswith("--"))  # runs and kind first, wherever they stood
    options = parser.parse_args(words)
    kind = _kind(parser, options, given)
    out = _out(parser, options)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    runs = [load_run(path, options.weights) for path in options.runs]
    if out is not None:
        import_optional("matplotlib.figure", "drawing")  # say so before the work, not after it
    whole = chosen_images(runs[0], options)
    dataset = some_of(whole, min(len(whole), options.images or kind.images))
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        job = Job(_named(runs), dataset, options, bar)
        found = kind.work(job)
    files = [] if out is None else found.draw(out)
    if options.json:
        print(json.dumps(_as_json(job, found, files), indent=2))
    else:
        _show(job, found, files)


def _kind(parser: Parser, options: Any, given: set[str]) -> Kind:
    """Return the kind; refuse what it does not go with."""
    name, there = options.kind, ", ".join(KINDS)
    if name not in KINDS:
        if options.runs[0] in KINDS:
            parser.error(f"the kind comes last: torchcaps analyze RUN {options.runs[0]}")
        parser.error(f"the last word must be the kind of analysis, one of {there}, got {name!r}")
    kind = KINDS[name]
    if len(options.runs) > 1 and not kind.several:
        several = ", ".join(name for name, other in KINDS.items() if other.several)
        parser.error(f"{name} is of one run, got {len(options.runs)}: those that compare several are {several}")
    if len({os.path.realpath(os.path.expanduser(run)) for run in options.runs}) < len(options.runs):
        parser.error("each run once: there is nothing to compare a run with itself by")
    for flag in sorted(given):
        own = flag[2:].replace("-", "_")
        if own in OWN and own not in kind.flags:
            takers = ", ".join(name for name, other in KINDS.items() if own in other.flags)
            parser.error(f"{flag} is for {takers}, not for {name}")
    for own in ("num_threads", "images", "iterations", "epochs", "train_images"):
        if options[own] is not None and options[own] < 1:
            parser.error(f"--{own.replace('_', '-')} must be 1 or more, got {options[own]}")
    return kind


def _out(parser: Parser, options: Any) -> Path | None:
    """Return where the figure goes."""
    if options.out is None:
        return None if options.json else Path(options.runs[0]).expanduser() / "figures" / f"{options.kind}.png"
    out = Path(options.out).expanduser()
    if out.suffix.lower() not in ENDINGS:
        parser.error(f"--out must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {options.out!r}")
    return out


def _named(runs: list[Trained]) -> dict[str, Trained]:
    """Return runs by the names of their folders, or where two have the same by their paths."""
    names = [run.path.resolve().name for run in runs]
    same = len(set(names)) < len(names)
    return {str(run.path) if same else name: run for name, run in zip(names, runs, strict=True)}


def _show(job: Job, found: Found, files: list[Path]) -> None:
    for run in job.runs.values():
        if run.note:
            print(f"torchcaps: {run.note}", file=sys.stderr)
    names = ", ".join(str(run.path) for run in job.runs.values())
    count = "1 image" if found.n_images == 1 else f"{found.n_images:,} images"
    print(f"{names}: {found.title}; {found.data or f'{job.dataset.name}, {job.dataset.split}'}: {count}\n")
    headings = [heading for heading, _ in found.columns.values()]
    table = start_table(found.rows, *headings, right=tuple(headings))
    for name, row in found.numbers.items():
        cells = [(row.get(key), shown) for key, (_, shown) in found.columns.items()]
        table.add_row(name, *("" if value is None else shown(value) for value, shown in cells))
    print_table(table)
    for note in found.notes:
        print(note)
    print("\n".join(f"written: {path}" for path in files))


def _as_json(job: Job, found: Found, files: list[Path]) -> dict[str, Any]:
    return {
        "kind": job.options.kind,
        "runs": {name: {"path": str(run.path), "weights": run.weights} for name, run in job.runs.items()},
        "data": job.dataset.name,
        "split": job.dataset.split,
        "images": found.n_images,
        "numbers": found.numbers,
        **found.also,
        "notes": list(found.notes),
        "figures": [str(path) for path in files],
    }
