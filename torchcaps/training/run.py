"""Train or resume a run, from opening the data to the results, figures and report."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.files import write_atomic
from torchcaps._core.machine import describe_machine, record_header
from torchcaps._core.optional import import_optional
from torchcaps.data import Loader
from torchcaps.data.own import DataLoaderBatches
from torchcaps.models import Network
from torchcaps.routing import Quadratic
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.distributed import Engine, check_device, num_processes, process_rank
from torchcaps.training.errors import CheckpointError, RunError, RunInterrupted
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.figures import draw_run
from torchcaps.training.limits import check_training, max_checkpoint_bytes
from torchcaps.training.logging import ConsoleLogger, describe_run
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.settings_file import limit_resources, may_download
from torchcaps.training.setup import (
    RunData,
    adapt_to_data,
    build_loader,
    build_network,
    check_n_objects,
    open_data,
    training_labels,
)
from torchcaps.training.state import BestResult, TrainResult
from torchcaps.training.trainer import EvaluationInterrupted, Trainer

__all__ = ["resume", "train"]


def train(
    spec: RunSpec,
    out: str | os.PathLike[str] | None = None,
    fixed: frozenset[str] = frozenset(),
    console: ConsoleLogger | None = None,
    figures: bool = True,
    clock: Callable[[], float] = time.monotonic,
    download: bool = True,
    limited: bool = False,
    data: RunData | None = None,
    network: Network | None = None,
) -> TrainResult:
    """Train a model in a new run directory.

    Args:
        spec: settings of the run.
        out: the run directory, empty or missing (default: a new one in ``runs/``).
        fixed: model fields among ``image``, ``classes`` and ``n_objects`` that are not adapted to the data; an error is
            raised if they don't match it.
        console: prints the progress (default: a bar on a terminal, lines otherwise).
        figures: draw learning curves, reconstructions and the confusion matrix at the end.
        clock: returns seconds, for time limits.
        download: download missing data.
        limited: the settings may be those of a stranger: limit them as `resume` does.
        data: data sets; by default those that the settings name.
        network: the model, trained in place from its current weights; by default one with new weights.

    >>> spec = RunSpec.of("capsnet_small", epochs=1, max_train_images=40, max_test_images=20)
    >>> train(spec, "runs/a", console=ConsoleLogger(enabled=False), figures=False).steps
    1
    """
    check_device(spec.device)
    if out is not None and process_rank() == 0:
        try:
            RunDirectory.create(out, "").release()  # reports an unusable directory before any data is loaded
        except RunError as error:
            raise ValueError(str(error)) from error
    data = open_data(spec, download) if data is None else data
    spec = adapt_to_data(spec, data, fixed)
    if limited:
        check_training(spec)
    is_new = network is None
    network = build_network(spec) if network is None else network
    check_n_objects(network, data)
    _check_settings(spec, network, data)
    console = console or ConsoleLogger(process_rank() == 0)
    if console.enabled:
        for line in describe_run(spec, network, data, Path(out or "runs")):
            console.print(line)
    engine = Engine(spec)
    created = (
        RunDirectory.create(out, f"{_short_name(spec.model)}-{_short_name(spec.recipe.data)}")
        if engine.is_main
        else None
    )
    path = engine.broadcast(None if created is None else str(created.path))
    with created or RunDirectory(path) as directory:
        if engine.is_main:
            directory.lock()
            directory.write_config(spec)
        console.print(f"run directory: {directory.path}")
        trainer = Trainer(spec, directory, engine, data, network, console, clock)
        if not is_new:
            trainer.save()  # a resumed run can't make the initial weights again
        return _finish(trainer, figures)


def resume(
    path: str | os.PathLike[str],
    change: Callable[[RunSpec], RunSpec] = lambda spec: spec,
    console: ConsoleLogger | None = None,
    figures: bool = True,
    clock: Callable[[], float] = time.monotonic,
    trust_remote_code: bool = False,
    own_data_dir: bool = False,
    data: RunData | None = None,
    network: Network | None = None,
) -> TrainResult:
    """Continue a run from its newest intact checkpoint.

    Processes and threads that its settings ask for are limited (`torchcaps.training.settings_file.limit_resources`).

    Args:
        path: the run directory.
        change: returns the settings with those changed that may change on resume, such as ``epochs``.
        console: as for `train`.
        figures: as for `train`.
        clock: as for `train`.
        trust_remote_code: as for `load_run`.
        own_data_dir: ``data_dir`` is the user's choice, so missing data may be downloaded to it. By default, data is
            downloaded only if the directory is the user's own (see `torchcaps.data.storage.data_root`) or if ``change``
            has changed it.
        data: as for `train`.
        network: the model, whose weights are replaced; by default a new one.

    >>> spec = RunSpec.of("capsnet_small", epochs=1, max_train_images=40, val_fraction=0, max_test_images=20)
    >>> train(spec, "runs/b", console=ConsoleLogger(enabled=False), figures=False).steps
    1
    >>> resume("runs/b", lambda s: s.replace_recipe(epochs=2), ConsoleLogger(enabled=False), figures=False).steps
    2
    """
    with RunDirectory.open(path) as directory:
        if process_rank() == 0:
            directory.lock()
            directory.remove_staging()
        recorded, notes = limit_resources(directory.read_config(trust_remote_code))
        spec = change(recorded)
        download = own_data_dir or spec.data_dir != recorded.data_dir or may_download(spec.data_dir)
        check_device(spec.device)
        meta = _check_model(directory, spec)
        checkpoint, problems = directory.newest_checkpoint(None if meta is None else max_checkpoint_bytes(meta))
        if problems and checkpoint is None:
            raise CheckpointError(f"{problems[0]}, and no other checkpoint exists")
        if checkpoint is not None and meta is not None:
            try:
                checkpoint.check_weights(meta, "model")
            except CheckpointError as error:
                raise CheckpointError(f"{directory.path}: {error}") from error
        data = open_data(spec, download) if data is None else data
        adapt_to_data(spec, data, frozenset({"image", "classes", "n_objects"}))  # raises if the data has changed
        network = build_network(spec) if network is None else network
        check_n_objects(network, data)
        _check_settings(spec, network, data)
        engine, console = Engine(spec), console or ConsoleLogger(process_rank() == 0)
        trainer = Trainer(spec, directory, engine, data, network, console, clock)
        for note in notes:
            console.print(f"warning: {note}")
        for problem in problems:
            console.print(f"warning: {problem}; resuming from the previous checkpoint")
        best_was_damaged = engine.is_main and _remove_damaged_best(trainer)
        if checkpoint is not None:
            try:
                trainer.load_checkpoint(checkpoint)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint in {directory.path} does not belong to this run: {error}"
                ) from error
        if engine.broadcast(best_was_damaged):
            trainer.state.best = BestResult()
        if trainer.total_steps < trainer.state.step:
            raise ValueError(
                f"{directory.path} has already been trained for {trainer.state.step:,} steps, more than the "
                f"{trainer.total_steps:,} it is to be resumed for: give more --epochs or --steps"
            )
        engine.barrier()  # until all processes have read the checkpoint
        if engine.is_main:
            if problems:
                directory.set_aside(directory.last)
            directory.write_config(spec)
        console.print(f"resuming {directory.path} at step {trainer.state.step:,}, epoch {trainer.epoch:.2f}")
        return _finish(trainer, figures)


def _check_model(directory: RunDirectory, spec: RunSpec) -> Network | None:
    """Return the model of a run on the meta device, see `check_training`; the error names the run directory."""
    try:
        return check_training(spec)
    except CheckpointError as error:
        raise CheckpointError(f"{directory.path}: {error}") from error


def _short_name(name: str) -> str:
    """Return the last component of a path or import path, for the name of a run directory; ``own`` for no name."""
    if not name:
        return "own"
    return Path(name).name if os.sep in name else name.rpartition(".")[2] or name


def _check_settings(spec: RunSpec, network: Network, data: RunData) -> None:
    """Reject settings that contradict each other or need a package that is not installed."""
    recipe = spec.recipe
    if spec.tensorboard:
        import_optional("tensorboard", "--tensorboard")
    n_quadratic = sum(isinstance(getattr(m, "routing", None), Quadratic) for m in network.modules())
    if recipe.ascents and not n_quadratic:
        raise ValueError(f"--ascents {recipe.ascents} needs a model with Quadratic routing: use --routing quadratic")
    if recipe.ascents and recipe.reuse_children and n_quadratic > 1:
        raise ValueError(
            f"--reuse-children needs a model with one layer of Quadratic routing, got {n_quadratic}: leave it out"
        )
    if recipe.class_weights == "balanced":
        training_labels(data)  # raises if the training set has none
    recipe.optimizer.make([torch.zeros(1)])  # raises if its hyperparameters are invalid
    if data.val is None:
        flags = {
            "--eval-weights best": recipe.eval_weights == "best",
            "--early-stopping-patience": spec.early_stopping_patience is not None,
            "--target-accuracy": spec.target_accuracy is not None,
        }
        for flag, is_used in flags.items():
            if is_used:
                raise ValueError(f"{flag} needs a validation set: use --val-fraction 0.1")
    if recipe.batch_size < num_processes():
        raise ValueError(
            f"--batch-size must be at least the number of processes, {num_processes()}, got {recipe.batch_size}"
        )


def _remove_damaged_best(trainer: Trainer) -> bool:
    """Rename the best checkpoint if it can't be read; return whether it was."""
    path = trainer.directory.best
    if not path.exists():
        return False
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        trainer.console.print(f"warning: {error}; continuing without the best checkpoint so far")
        trainer.directory.set_aside(path)
        return True
    return False


def _finish(trainer: Trainer, figures: bool) -> TrainResult:
    """Train, evaluate on the test set, and write results and figures."""
    directory, engine = trainer.directory, trainer.engine
    try:
        with trainer.stop_signal:  # from the first step to the end of the evaluation
            state = trainer.train()
            tests = _evaluate_test_set(trainer)
        assert state.stop_reason is not None
        result = TrainResult(
            directory.path,
            state.stop_reason,
            trainer.epoch,
            state.step,
            state.seconds,
            trainer.recipe.eval_weights,
            tests,
            trainer.spec.names_own_code,
        )
        if engine.is_main:
            write_atomic(directory.results, json.dumps(_results_json(trainer, result), indent=2) + "\n", RunError)
            if figures:
                _draw(trainer, result)
        engine.barrier()
    finally:
        if trainer.metrics is not None:
            trainer.metrics.close()
    engine.close()
    return result


def _evaluate_test_set(trainer: Trainer) -> dict[str, Evaluation]:
    """Evaluate each kind of weights on the test set, once. No choice depends on these results.

    Results are reused if the same weights have been evaluated before: by the last evaluation of a training without a
    validation set, or because the last weights are the best ones.
    """
    data, network, engine, step = trainer.data, trainer.network, trainer.engine, trainer.state.step
    if data.test is None:
        return {}
    loader = build_loader(data.test, trainer.spec, data.pipeline, False, engine)
    current = "last" if trainer.ema is None else "ema"  # the weights that are evaluated during training
    results: dict[str, Evaluation] = {}
    if trainer.eval_split == "test" and trainer.last_eval is not None and trainer.last_eval[0] == step:
        results[current] = trainer.last_eval[1]
    if "last" not in results:
        results["last"] = _evaluate(trainer, loader)
    if trainer.ema is not None and "ema" not in results:
        with trainer.ema.swapped_into(network):
            results["ema"] = _evaluate(trainer, loader)
    last = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    if engine.broadcast(engine.is_main and _load_best(trainer)):
        engine.broadcast_weights(network)
        is_current = trainer.state.best.step == step
        results["best"] = results[current] if is_current else _evaluate(trainer, loader)
        if trainer.recipe.eval_weights != "best":
            network.load_state_dict(last)
    return {kind: results[kind] for kind in ("last", "ema", "best") if kind in results}


def _evaluate(trainer: Trainer, loader: Loader | DataLoaderBatches) -> Evaluation:
    """Evaluate on the test set; after a signal raise `RunInterrupted` with the command that repeats it."""
    try:
        return trainer.evaluate(loader)
    except EvaluationInterrupted:
        raise RunInterrupted(
            "training is complete and saved, but the final evaluation was interrupted. Repeat it with: "
            f"{trainer.checkpoints.resume_command}",
            trainer.stop_signal.signal,
        ) from None


def _load_best(trainer: Trainer) -> bool:
    """Load the weights with the best validation result; return whether there are any."""
    path = trainer.directory.best
    if not path.exists():
        return False
    try:
        read_checkpoint(path, trainer.engine.device).load_weights(trainer.network)
    except CheckpointError as error:
        trainer.console.print(f"warning: {error}; the results don't include the best weights")
        trainer.directory.set_aside(path)
        return False
    return True


def _results_json(trainer: Trainer, result: TrainResult) -> dict[str, Any]:
    """Return the content of ``results.json``."""
    return {
        "model": trainer.spec.model,
        "data": trainer.recipe.data,
        "stop_reason": result.stop_reason,
        "epochs": round(result.epochs, 4),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "seed": trainer.spec.seed,
        "eval_weights": result.eval_weights,
        "best": dataclasses.asdict(trainer.state.best) if trainer.directory.best.exists() else None,
        "test": {kind: evaluation.to_json() for kind, evaluation in result.test_results.items()},
        **record_header(),
        "machine": describe_machine(trainer.engine.world_size, str(trainer.engine.device)),
    }


def _draw(trainer: Trainer, result: TrainResult) -> None:
    """Draw the figures of a run. If that fails, the run is still complete."""
    data, network = trainer.data, trainer.network
    loader = None if data.test is None else build_loader(data.test, trainer.spec, data.pipeline, False)
    rows = trainer.metrics.rows if trainer.metrics is not None else []
    try:
        with trainer.ema.swapped_into(network) if trainer.ema is not None else contextlib.nullcontext():
            draw_run(rows, network, loader, result.test, trainer.directory.figures, trainer.spec.model)
    except (RunError, ValueError) as error:
        trainer.console.print(f"warning: the figures can't be drawn: {error}")
