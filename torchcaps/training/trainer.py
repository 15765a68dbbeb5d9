"""The training loop.

All randomness is a function of (seed, epoch, index) for images and of (seed, step, index) for dropout. A run that is
killed and resumed from a checkpoint, also in the middle of an epoch, therefore ends with bit-equal weights.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from torchcaps._core.random import step_seed
from torchcaps._core.values import deferred_checks, read_values
from torchcaps.data import Batch, Loader
from torchcaps.data.own import DataLoaderBatches
from torchcaps.models import Network
from torchcaps.nn import image_dropout
from torchcaps.routing import RoutingDivergence
from torchcaps.routing.quadratic import RecordedChildren
from torchcaps.training.ascent import CoefficientAscent
from torchcaps.training.chance import MIN_IMAGES, MIN_STEPS, describe_chance, describe_overfitting, is_at_chance
from torchcaps.training.checkpoint import Checkpoint, CheckpointWriter, restore_training
from torchcaps.training.config import RunSpec
from torchcaps.training.distributed import Engine, StopSignal, translate_peer_errors
from torchcaps.training.ema import EMA
from torchcaps.training.errors import CheckpointError, DivergenceError, RunInterrupted
from torchcaps.training.evaluation import BalancedLoss, Evaluation, RunningEvaluation, batch_loss, evaluate
from torchcaps.training.logging import ConsoleLogger, Expectation, MetricsLog
from torchcaps.training.nonfinite import check_weights, diagnose_step
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import RunData, build_loader, training_labels
from torchcaps.training.state import BestResult, StopReason, TrainState
from torchcaps.training.stopping import Timer, find_stop_reason, total_steps

__all__ = ["Trainer"]

EVAL_INTERVAL_STEPS = 10_000  # at most, if an epoch has more steps
SAVE = 1000  # request to save a checkpoint; smaller numbers are signals


class Trainer:
    """One run: model, optimizer, data, and the loop over them.

    Args:
        spec: settings, with the model's sizes matched to the data.
        directory: the run directory.
        engine: device and processes.
        data: training, validation and test set.
        network: the model with its initial weights.
        console: prints the progress.
        clock: returns seconds; decides about time limits and checkpoint intervals.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        engine: Engine,
        data: RunData,
        network: Network,
        console: ConsoleLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.recipe, self.directory, self.engine = spec, spec.recipe, directory, engine
        self.data, self.network, self.console, self.clock = data, network, console, clock
        self.state, self.timer = TrainState(), Timer(clock)
        self.loader = build_loader(data.train, spec, data.pipeline, True, engine)
        self.batches_per_epoch = self.loader.batches_per_epoch
        self.eval_interval = spec.eval_interval_steps or min(EVAL_INTERVAL_STEPS, self.batches_per_epoch)
        self.eval_split = "val" if data.val is not None else "test"
        eval_set = data.val if data.val is not None else data.test
        self.eval_loader = build_loader(eval_set, spec, data.pipeline, False, engine) if eval_set is not None else None
        self.last_eval: tuple[int, Evaluation] | None = None  # the step and the result
        self.loss = network.loss()  # of evaluations, and by default of the training
        self.train_loss: torch.nn.Module = self.loss
        if self.recipe.class_weights == "balanced":
            self.train_loss = BalancedLoss(network.loss("none"), training_labels(data), network.spec.classes)
        network.to(engine.device)
        self.model, self.optimizer = engine.setup(network, self.recipe.optimizer.make(network.parameters()))
        self.ascent = CoefficientAscent(network, self.recipe)
        self.ema = EMA(network, spec.ema_decay) if self.recipe.eval_weights == "ema" else None
        self.train_metrics = RunningEvaluation(network)
        self.metrics: MetricsLog | None = None  # on rank 0, while training
        self.stop_signal = StopSignal()  # active while entered, see training/run.py
        self.checkpoints = CheckpointWriter(directory, spec, data)
        self._has_reported_chance = False

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return total_steps(self.recipe, self.state, self.batches_per_epoch)

    @property
    def epoch(self) -> float:
        """Progress in epochs."""
        return self.state.fractional_epoch(self.batches_per_epoch)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run."""
        self.state = restore_training(
            checkpoint, self.spec, len(self.data.train), self.network, self.optimizer.optimizer, self.ema
        )
        try:
            self.engine.load_precision_state(checkpoint.state.get("precision", {}))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint has no valid state of the gradient scaler: {error}") from error
        if self.state.counts and self.engine.is_main:  # the sum over all processes
            self.train_metrics.restore(self.state.counts)

    def train(self) -> TrainState:
        """Train until a stop criterion is met; raise `RunInterrupted` after a signal."""
        state = self.state
        if self.engine.is_main:
            tensorboard = self.directory.path / "tensorboard" if self.spec.tensorboard else None
            self.metrics = MetricsLog(self.directory.metrics, state.logged_step, tensorboard)
        self.timer = Timer(self.clock, state.seconds, state.step)
        self.network.train()
        with translate_peer_errors(), self.console.progress(self.total_steps, state.step):
            while state.stop_reason is None:
                batches = self.loader.epoch(state.epoch, min(state.batch, len(self.loader)))
                while state.batch < self.batches_per_epoch and not self._is_finished():
                    if self._is_eval_due():
                        self._log_metrics(evaluate=True)
                        if self._is_finished():
                            break
                    self._train_step(next(batches, None))
                    self._plan_steps()
                    self.console.on_step(state.step, self.epoch, self._expectation(), self.train_metrics)
                    self._save_or_stop_if_due()
                self._end_epoch()
        return state

    def evaluate(self, loader: Loader | DataLoaderBatches) -> Evaluation:
        """Evaluate the current weights, on all processes together."""
        # Not through the DDP wrapper, which would wait for processes that have no images left.
        with self.engine.fabric.autocast():
            return evaluate(
                self.network, loader, self.loss, self.state.step, self.engine.all_reduce_sum, self._on_eval_batch
            )

    # One step ----------------------------------------------------------------------------------------------

    def _train_step(self, batch: Batch | None) -> None:
        """Update the weights with one batch (this process's part of it).

        Args:
            batch: ``None`` if the last batch of an epoch has fewer images than there are processes, and this one has
                none of them. Another batch then takes part in the collectives with weight 0.
        """
        state = self.state
        weight = 1.0
        if batch is None:
            batch, weight = self.loader.batch(state.epoch, 0), 0.0
        remaining = len(self.data.train) - state.batch * self.loader.batch_size
        is_alone = self.engine.world_size == 1
        n_images = len(batch.labels) if is_alone else min(self.loader.batch_size, remaining)  # of all processes
        lr_factor = self.recipe.lr_schedule.factor(state.step, state.epoch, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.optimizer.lr * lr_factor
        seed = step_seed(self.spec.seed, state.step, self.engine.rank)
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        results: list[Tensor] = []  # scores, labels and loss of each micro-batch
        try:
            # On an accelerator the step waits for the device once, for all checks and results together.
            with self.ascent.recording(state.step) as recorded, deferred_checks():
                for micro_batch, is_last in _micro_batches(batch, self.spec.micro_batches):
                    with self.engine.fabric.no_backward_sync(self.model, enabled=not is_last):
                        with image_dropout(self.spec.seed, state.step, micro_batch.indices):
                            output = self.model(micro_batch.images, micro_batch.labels)
                        loss = batch_loss(self.train_loss, output, micro_batch, state.step)
                        # DDP averages over processes; every image must have equal weight.
                        fraction = weight * len(micro_batch.labels) * self.engine.world_size / n_images
                        self.engine.fabric.backward(loss * fraction)
                    results += [output.scores.detach(), micro_batch.labels, loss.detach()]
                norm, *results = read_values(self._clip_gradients(), *results)
        except ValueError as error:
            self._diagnose(batch, seed, error)
            raise
        for scores, labels, loss in zip(results[::3], results[1::3], results[2::3], strict=True) if weight else ():
            self.train_metrics.update(scores, labels, float(loss))
        state.grad_norm = float(norm)
        if not (abs(state.grad_norm) < float("inf") and torch.isfinite(self.train_metrics.loss)):
            self._diagnose(batch, seed)
        self.optimizer.step()
        if self.ascent.is_due(state.step):
            self._ascend(recorded, batch, lr_factor, weight, n_images)
        if self.ema is not None:
            self.ema.update(self.network)
        state.step += 1
        state.batch += 1

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients to ``max_grad_norm``, if set; return their norm before clipping, on their device."""
        max_norm = self.spec.max_grad_norm
        if self.spec.precision == "16-mixed":  # scaled gradients may overflow; the gradient scaler handles it
            if max_norm is not None:
                self.engine.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
            return torch.zeros(())
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.network.parameters(), max_norm, norm)
        return norm

    def _ascend(
        self, recorded: RecordedChildren | None, batch: Batch, lr_factor: float, weight: float, n_images: int
    ) -> None:
        """Take the ascent steps on the routing coefficients: Yang 2021, Algorithm 1."""
        all_reduce_sum = self.engine.all_reduce_sum

        def reduce(slope: Tensor) -> Tensor:
            return all_reduce_sum(slope * weight)

        try:
            self.ascent.run(recorded, batch.images, batch.labels, self.state.step, lr_factor, n_images, reduce)
        except RoutingDivergence as error:
            raise DivergenceError(f"step {self.state.step + 1:,}: {error}. {self.checkpoints.status}") from error

    def _diagnose(self, batch: Batch, seed: int, error: Exception | None = None) -> None:
        """Raise a `DivergenceError` that names the source of the first non-finite value of the step."""
        with image_dropout(self.spec.seed, self.state.step, batch.indices):
            diagnose_step(self.network, self.loss, batch, self.state.step, seed, self.checkpoints.status, error)

    def _plan_steps(self) -> None:
        """Estimate how many steps fit into the time limit, if there is one: after each step, at the present speed."""
        minutes = self.spec.max_minutes
        if minutes is None:
            return
        steps = self.engine.broadcast(self.timer.estimate_steps(self.state.step, minutes))
        if steps is not None:
            self.state.planned_steps, self.state.planned_minutes = int(steps), minutes

    def _expectation(self) -> Expectation:
        """Return the length of the whole run and the time left, as the progress shows them."""
        total = self.total_steps
        left = self.timer.seconds_left(self.state.step, total)
        if self.state.stop_reason is not None or self.state.step >= total:
            left = None
        elif left is not None and self.spec.max_minutes is not None:
            left = min(left, max(0.0, 60 * self.spec.max_minutes - self.timer.seconds))
        is_known = self.spec.max_minutes is None or self.state.planned_steps > 0
        return Expectation(total, total / self.batches_per_epoch if is_known else None, left)

    # Between steps -----------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        """Return whether a stop criterion is met; record it in the state."""
        self.state.stop_reason = find_stop_reason(
            self.spec, self.state, self.total_steps, lambda: self.engine.all_reduce_max(self.timer.seconds)
        )
        return self.state.stop_reason is not None

    def _is_eval_due(self) -> bool:
        """Return whether an evaluation inside an epoch is due.

        Checked before a step: a run that was stopped before or during the evaluation repeats it on resume.
        """
        state = self.state
        return state.batch > 0 and state.step % self.eval_interval == 0 and state.logged_step != state.step

    def _save_or_stop_if_due(self) -> None:
        """Save a checkpoint if due; save and stop if a signal arrived (synchronized across processes)."""
        interval = self.spec.checkpoint_interval_steps
        is_due = self.engine.is_main and (
            self.timer.seconds_since_save >= 60 * self.spec.checkpoint_interval_minutes
            or (interval is not None and self.state.step % interval == 0)
        )
        request = int(self.engine.all_reduce_max(self.stop_signal.signal or SAVE * is_due))
        if 0 < request < SAVE:
            self._save_and_stop(request)
        if request:
            self.save()

    def _save_and_stop(self, signal: int) -> NoReturn:
        """Save a checkpoint and raise `RunInterrupted`."""
        self.state.stop_reason = StopReason.INTERRUPTED
        self.save()
        position = f"step {self.state.step:,}, epoch {self.epoch:.2f}"
        advice = f"Continue with: {self.checkpoints.resume_command}"
        raise RunInterrupted(f"stopped at {position}, checkpoint saved. {advice}", signal)

    def _end_epoch(self) -> None:
        """Log and save at the end of an epoch, or of the run."""
        state = self.state
        is_complete = state.batch >= self.batches_per_epoch
        if is_complete:
            self._is_finished()
        is_due = is_complete and (state.epoch + 1) % self.spec.eval_interval_epochs == 0
        if state.logged_step != state.step:
            self._log_metrics(evaluate=is_due or state.stop_reason is not None)
        if is_complete:
            state.epoch, state.batch = state.epoch + 1, 0
        self.save()

    def _log_metrics(self, evaluate: bool) -> None:
        """Write a row of metrics, after an evaluation if asked for; update the best checkpoint."""
        self._check_weights()
        state = self.state
        train = self.train_metrics.compute(self.engine.all_reduce_sum)
        result = None
        if evaluate and self.eval_loader is not None:
            try:
                with self._eval_weights():
                    result = self.evaluate(self.eval_loader)
            except EvaluationInterrupted:  # the evaluation is repeated on resume
                self.network.train()
                self._save_and_stop(self.stop_signal.signal)
            self.last_eval = state.step, result
            if self.eval_split == "val":
                self._update_best(result)
        row = {
            "epoch": round(self.epoch, 4),
            "step": state.step,
            "seconds": round(self.timer.seconds, 1),
            "lr": self.recipe.lr_at(max(0, state.step - 1), state.epoch, self.total_steps),
            "train_loss": train.loss if train.n else None,
            "train_accuracy": train.accuracy if train.n else None,
            "grad_norm": state.grad_norm,
        }
        if result is not None:
            row |= {f"{self.eval_split}_loss": result.loss, f"{self.eval_split}_accuracy": result.accuracy}
        if self.metrics is not None:
            self.metrics.write(**row)
        self.console.on_metrics(row, self._expectation())
        self._report_chance(train, result)
        self.train_metrics, state.logged_step = RunningEvaluation(self.network), state.step

    def _report_chance(self, train: Evaluation, result: Evaluation | None) -> None:
        """Report once, on rank 0, a run at chance: on the training set after an epoch, or on others at the end."""
        state = self.state
        is_early = state.step < MIN_STEPS and state.stop_reason is None
        if self.metrics is None or self._has_reported_chance or self.network.n_objects != 1 or is_early:
            return
        lines: Iterator[str] = iter(())
        if is_at_chance(train):
            if train.n >= len(self.data.train):
                batch = self.loader.batch(state.epoch, 0)
                lines = describe_chance(train, self.network, batch, self.data.train, self.recipe, state.grad_norm)
        elif state.stop_reason and result is not None and train.n >= MIN_IMAGES and is_at_chance(result):
            lines = describe_overfitting(train, result, self.eval_split, self.network, state.step)
        for line in lines:
            self._has_reported_chance = True
            self.console.warn(line)

    def _eval_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the network has the weights to evaluate: EMA weights, if enabled."""
        return self.ema.swapped_into(self.network) if self.ema is not None else contextlib.nullcontext()

    def _on_eval_batch(self) -> None:
        """Interrupt the evaluation after a signal; only a single process can do so without the others."""
        self.console.on_eval_batch()
        if self.stop_signal.signal and self.engine.world_size == 1:
            raise EvaluationInterrupted

    def _update_best(self, result: Evaluation) -> None:
        """Save the weights if they are the best so far; otherwise count the evaluation for early stopping."""
        state = self.state
        if state.best.is_worse_than(result.accuracy, result.loss):
            state.best = BestResult(result.accuracy, result.loss, state.step, self.epoch)
            state.evals_since_best = 0
            if self.engine.is_main:
                with self._eval_weights():
                    self.checkpoints.save_best(state, self.engine.precision_state(), self.network)
        else:
            state.evals_since_best += 1

    def save(self) -> None:
        """Save a checkpoint; a collective operation of all processes."""
        self._check_weights()
        reduced = RunningEvaluation(self.network)
        reduced.counts = self.engine.all_reduce_sum(self.train_metrics.counts)
        reduced.loss = self.engine.all_reduce_sum(self.train_metrics.loss)
        self.state.counts, self.state.seconds = reduced.to_plain(), self.timer.seconds
        if self.engine.is_main:
            optimizer = self.optimizer.optimizer
            self.checkpoints.save_last(self.state, self.engine.precision_state(), self.network, optimizer, self.ema)
        self.timer.mark_saved()

    def _check_weights(self) -> None:
        """Raise a `DivergenceError` if a weight is non-finite."""
        check_weights(self.network, self.state.step, self.checkpoints.status)


class EvaluationInterrupted(Exception):
    """A signal arrived during an evaluation."""


def _micro_batches(batch: Batch, count: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the micro-batches of a batch, each with whether it is the last."""
    if count == 1:
        yield batch, True
        return
    parts = [tensor.chunk(count) for tensor in (batch.images, batch.labels, batch.targets, batch.indices)]
    for index, micro_batch in enumerate(zip(*parts, strict=True)):
        yield Batch(*micro_batch), index == len(parts[0]) - 1
