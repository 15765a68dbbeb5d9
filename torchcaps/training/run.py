"""A run from its beginning to its report: what ``torchcaps train`` does."""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchcaps
from torchcaps._core.optional import import_optional
from torchcaps.models import Network
from torchcaps.profiling.memory import estimate_memory
from torchcaps.routing import Quadratic
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.display import Display
from torchcaps.training.distributed import Engine, n_processes, process_rank
from torchcaps.training.errors import CheckpointError, RunError
from torchcaps.training.evaluation import Measures
from torchcaps.training.pictures import draw_run
from torchcaps.training.run_dir import RunFolder
from torchcaps.training.setup import Images, check_objects, fitted, make_loader, make_network, open_images
from torchcaps.training.state import Best
from torchcaps.training.trainer import Training

__all__ = ["Result", "resume", "train"]


@dataclass(frozen=True)
class Result:
    """What a run has brought.

    Args:
        folder: where it is written.
        ended: why it is over.
        epochs, steps, seconds: how long it was.
        chosen: which of the weights count: ``"last"``, ``"best"`` or ``"ema"``.
        tests: for each kind of weights that there is what it does on the test images; empty where there are none.
    """

    folder: Path
    ended: str
    epochs: float
    steps: int
    seconds: float
    chosen: str
    tests: dict[str, Measures]

    @property
    def test(self) -> Measures | None:
        """What the weights that count do on the test images."""
        return self.tests.get(self.chosen)


def train(
    spec: RunSpec,
    out: str | os.PathLike[str] | None = None,
    chosen: frozenset[str] = frozenset(),
    display: Display | None = None,
    pictures: bool = True,
) -> Result:
    """Train a model.

    Args:
        spec: what was chosen.
        out: the folder of the run; by default a new one below ``runs``.
        chosen: fields of the model that are not to follow the data.
        display: what shows the run; by default a bar on a terminal, and lines elsewhere.
        pictures: draw its curves, reconstructions and confusions when it is over.
    """
    if out is not None and process_rank() == 0:
        RunFolder.new(out, "").release()  # says what is wrong with it before anything is loaded
    images = open_images(spec)
    spec = fitted(spec, images, chosen)
    network = make_network(spec)
    check_objects(network, images)
    _check(spec, network, images)
    display = display or Display(process_rank() == 0)
    _announce(spec, network, images, display, out)
    engine = Engine(spec)
    own = RunFolder.new(out, f"{_short(spec.model)}-{_short(spec.recipe.data)}") if engine.first else None
    folder = own or RunFolder(engine.told(None))
    if own is not None:
        engine.told(str(own.path))
    with folder:
        if engine.first:
            folder.hold()
            folder.write_config(spec)
        display.say(f"in {folder.path}")
        return _finished(Training(spec, folder, engine, images, network, display), pictures)


def resume(
    path: str | os.PathLike[str],
    change: Callable[[RunSpec], RunSpec] = lambda spec: spec,
    display: Display | None = None,
    pictures: bool = True,
) -> Result:
    """Go on with a run from its newest checkpoint that is whole.

    Args:
        path: the folder of the run.
        change: returns the run with other bounds.
        display: as for `train`.
        pictures: as for `train`.
    """
    with RunFolder.existing(path) as folder:
        if process_rank() == 0:
            folder.hold()
            folder.sweep()
        spec = change(folder.read_config())
        checkpoint, problems = folder.newest()
        if problems and checkpoint is None:
            raise CheckpointError(f"{problems[0]}; there is no other checkpoint to go on from")
        images = open_images(spec)
        fitted(spec, images, frozenset({"image", "classes", "n_objects"}))  # says so where the data has changed
        network = make_network(spec)
        check_objects(network, images)
        _check(spec, network, images)
        engine, display = Engine(spec), display or Display(process_rank() == 0)
        training = Training(spec, folder, engine, images, network, display)
        for problem in problems:
            display.say(f"{problem}; going on from the one before it")
        lost_best = False
        if engine.first and folder.best.exists():
            try:
                read_checkpoint(folder.best)
            except CheckpointError as error:
                display.say(f"{error}; set aside, a new best one is looked for")
                folder.set_aside(folder.best)
                lost_best = True
        if checkpoint is not None:
            try:
                training.resume(checkpoint)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint in {folder.path} does not belong to this run: {error}"
                ) from error
        if engine.told(lost_best):
            training.state.best = Best()
        if training.total < training.state.step:
            bound = f"the {training.total:,} steps that it is to have lie before that"
            raise ValueError(f"{folder.path} is at step {training.state.step:,} already: {bound}")
        engine.wait()  # until all have read it
        if engine.first:
            if problems:
                folder.set_aside(folder.last)
            folder.write_config(spec)
        state = training.state
        epochs = state.epoch + state.number / training.per_epoch
        display.say(f"going on with {folder.path} at step {state.step:,}, epoch {epochs:.2f}")
        return _finished(training, pictures)


def _short(data: str) -> str:
    """Return a name for a data set that a folder can have."""
    return Path(data).name if os.sep in data else data.rpartition(".")[2] or data


def _check(spec: RunSpec, network: Network, images: Images) -> None:
    """Refuse what contradicts itself, and what is not installed."""
    recipe = spec.recipe
    if spec.tensorboard:
        import_optional("tensorboard", "--tensorboard")
    if recipe.ascents and not any(isinstance(getattr(m, "routing", None), Quadratic) for m in network.modules()):
        raise ValueError("--ascents is for Quadratic routing (--routing quadratic), which this model does not have")
    recipe.optimizer.make([torch.zeros(1)])  # says what is wrong with its numbers
    if images.held_out is None:
        if recipe.eval_weights == "best":
            raise ValueError("eval_weights 'best' needs images to choose by: hold some out with --val-fraction 0.1")
        for flag, value in (
            ("--early-stopping-patience", spec.early_stopping_patience),
            ("--target-accuracy", spec.target_accuracy),
        ):
            if value is not None:
                raise ValueError(f"{flag} needs images to judge by: hold some out with --val-fraction 0.1")
    if recipe.batch_size < n_processes():
        raise ValueError(
            f"--batch-size must be at least the number of processes, {n_processes()}, got {recipe.batch_size}"
        )


def _announce(
    spec: RunSpec, network: Network, images: Images, display: Display, out: str | os.PathLike[str] | None
) -> None:
    """Say what is about to happen, and the memory that it takes."""
    if not display.speak:
        return
    recipe = spec.recipe
    size = "x".join(map(str, network.spec.image))
    display.say(f"{spec.model}: {network.n_parameters:,} parameters, images of {size}, {network.spec.classes} classes")
    counts = [f"{len(images.train):,} to learn from"]
    counts += [f"{len(images.held_out):,} held out"] if images.held_out is not None else []
    if images.test is not None:
        other = f" ({images.test.name})" if recipe.test_data else ""
        counts.append(f"{len(images.test):,} to test with{other}")
    display.say(f"{images.train.name}: {', '.join(counts)}")
    for dataset, use in ((images.held_out, "choose by"), (images.test, "test with")):
        labels = getattr(dataset, "labels", None)
        if dataset is None or labels is None:
            continue
        missing = [name for n, name in enumerate(dataset.classes) if not bool((labels == n).any())]
        if missing:
            display.say(f"no image to {use} of: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    long = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs:,} epochs"
    long += f", {spec.max_minutes:g} minutes at most" if spec.max_minutes is not None else ""
    rate = f"{recipe.optimizer.name} at {recipe.optimizer.lr:g}, {type(recipe.lr_schedule).__name__}"
    display.say(f"{recipe.loss.name.replace('_', '-')} loss, {rate}, batches of {recipe.batch_size}, {long}")
    with_memory = estimate_memory(network, -(-recipe.batch_size // (spec.micro_batches * n_processes())))
    needed, free = with_memory.total, _free_memory()
    display.say(f"memory: about {_bytes(needed)} to train" + (f", {_bytes(free)} free" if free else ""))
    size = 3 * 4 * network.n_parameters * (1 + recipe.optimizer.n_states)  # three checkpoints at most
    disk = shutil.disk_usage(_existing(Path(out or "runs"))).free
    if disk < size:
        display.say(f"the disk is nearly full: checkpoints take up to {_bytes(size)}, and {_bytes(disk)} are free")
    if free and needed > free:
        display.say("this is likely too much: a smaller --batch-size, or --micro-batches 4, takes less")


def _existing(path: Path) -> Path:
    """Return the nearest folder above that exists."""
    path = path.expanduser().resolve()
    return path if path.exists() else _existing(path.parent)


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _free_memory() -> int | None:
    """Return the bytes that are free on this machine, where it says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def _finished(training: Training, pictures: bool) -> Result:
    """Train to the end, test, and write the report."""
    folder, engine = training.folder, training.engine
    try:
        with training.request:  # from the first step to the end of the tests
            state = training.run()
            tests = _tested(training)
        epochs = state.epoch + state.number / training.per_epoch
        chosen = training.recipe.eval_weights
        result = Result(folder.path, state.ended, epochs, state.step, state.seconds, chosen, tests)
        if engine.first:
            folder.write_text(folder.results, json.dumps(_report(training, result), indent=2) + "\n")
            if pictures:
                _draw(training, result)
        engine.wait()
    finally:
        if training.record is not None:
            training.record.close()
    engine.close()
    return result


def _tested(training: Training) -> dict[str, Measures]:
    """Look at the test images with every kind of weights that there is; nothing is chosen by what comes out."""
    images, network, engine = training.images, training.network, training.engine
    if images.test is None:
        return {}
    loader = make_loader(images.test, training.spec, images.pipeline, False, engine)
    tests = {"last": training.tested(loader)}
    if training.average is not None:
        with training.average.in_place(network):
            tests["ema"] = training.tested(loader)
    own = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    if engine.told(engine.first and _take_best(training)):
        engine.share(network)
        tests["best"] = training.tested(loader)
        if training.recipe.eval_weights != "best":
            network.load_state_dict(own)
    return tests


def _take_best(training: Training) -> bool:
    """Give the network the best weights, where there are any; say so where they can't be read."""
    path = training.folder.best
    if not path.exists():
        return False
    try:
        read_checkpoint(path, training.engine.device).load_weights(training.network)
    except CheckpointError as error:
        training.display.say(f"{error}; the report goes without the best weights")
        training.folder.set_aside(path)
        return False
    return True


def _report(training: Training, result: Result) -> dict[str, Any]:
    """Return all that is worth knowing of a run later on."""
    return {
        "model": training.spec.model,
        "data": training.recipe.data,
        "ended": result.ended,
        "epochs": round(result.epochs, 4),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "seed": training.spec.seed,
        "weights": result.chosen,
        "best": dataclasses.asdict(training.state.best) if training.folder.best.exists() else None,
        "test": {kind: measures_json(found) for kind, found in result.tests.items()},
        "command": shlex.join(["torchcaps", *sys.argv[1:]]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(training.engine),
    }


def measures_json(found: Measures) -> dict[str, Any]:
    """Return what was measured as a file holds it."""
    low, high = found.interval
    return {"accuracy": found.accuracy, "interval": [low, high], **dataclasses.asdict(found)}


def machine(engine: Engine | None = None) -> dict[str, Any]:
    """Return what a run's time depends on."""
    cpu = platform.processor() or platform.machine()
    with_name = Path("/proc/cpuinfo")
    if with_name.exists():
        names = [line.partition(":")[2].strip() for line in with_name.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": engine.world if engine is not None else 1,
        "device": str(engine.device) if engine is not None else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchcaps": torchcaps.__version__,
    }


def _draw(training: Training, result: Result) -> None:
    """Draw the pictures of a run; that they can't be drawn is no reason to lose it."""
    folder, images, network = training.folder, training.images, training.network
    loader = None
    if images.test is not None:
        loader = make_loader(images.test, training.spec, images.pipeline, False)
    rows = training.record.rows if training.record is not None else []
    kind = result.chosen
    try:
        with training.average.in_place(network) if training.average is not None else contextlib.nullcontext():
            draw_run(rows, network, loader, result.tests.get(kind), folder.pictures, training.spec.model)
    except (RunError, ValueError) as error:
        training.display.say(f"the pictures can't be drawn: {error}")
