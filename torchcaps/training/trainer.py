"""The training loop, to be read in one sitting.

Chance is a function of (seed, epoch, index) for images and of (seed, step, process) for dropout, so that a run that was
killed and goes on from a checkpoint, in the middle of an epoch or not, ends with the weights of one that never stopped.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from torchcaps._core.random import step_seed
from torchcaps.data import Batch, Loader, MeanImage
from torchcaps.models import Network
from torchcaps.routing import Quadratic, RoutingDivergence
from torchcaps.training.average import Average
from torchcaps.training.checkpoint import (
    Checkpoint,
    optimizer_tensors,
    prefixed,
    refuse_foreign,
    restore_optimizer,
    write_checkpoint,
)
from torchcaps.training.config import RunSpec
from torchcaps.training.display import Display
from torchcaps.training.distributed import Engine, together
from torchcaps.training.errors import CheckpointError, Diverged, RunError, RunStopped
from torchcaps.training.evaluation import Measures, Tally, evaluate, loss_of
from torchcaps.training.logging import Record
from torchcaps.training.nonfinite import first_nonfinite
from torchcaps.training.run_dir import RunFolder
from torchcaps.training.setup import Images, make_loader
from torchcaps.training.signals import Request
from torchcaps.training.state import Best, State

__all__ = ["Training"]

MEASURED = 20  # steps whose speed lays out a schedule for --max-minutes
OFTEN = 10_000  # steps: where an epoch has more, there is a look in between
SPARED = 0.95  # of the time, the rest being for looks at the images held out


class Training:
    """A run on its way.

    Args:
        spec: what was chosen, fitted to the data.
        folder: where it is written.
        engine: what it runs on.
        images: its data.
        network: the model, its weights as they begin.
        display: what a person sees of it.
    """

    def __init__(
        self, spec: RunSpec, folder: RunFolder, engine: Engine, images: Images, network: Network, display: Display
    ) -> None:
        self.spec, self.recipe = spec, spec.recipe
        self.folder, self.engine, self.images, self.network, self.display = folder, engine, images, network, display
        self.state = State()
        self.loader = make_loader(images.train, spec, images.pipeline, True, engine)
        self.per_epoch = -(-len(images.train) // self.loader.batch_size)
        self.look_every = spec.eval_interval_steps or min(OFTEN, self.per_epoch)
        watched = images.held_out if images.held_out is not None else images.test
        self.watch = make_loader(watched, spec, images.pipeline, False, engine) if watched is not None else None
        self.loss = network.loss()
        network.to(engine.device)
        optimizer = self.recipe.optimizer.make(network.parameters())
        self.model, self.optimizer = engine.setup(network, optimizer)
        self.average = Average(network, spec.ema_decay) if self.recipe.eval_weights == "ema" else None
        self.tally = Tally(network)
        self.record: Record | None = None
        self.request = Request()  # is heard while it is entered

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        refuse_foreign(checkpoint, self.spec)
        checkpoint.load_weights(self.network)
        restore_optimizer(self.optimizer.optimizer, checkpoint.part("optimizer"))
        self.state = State.from_plain(checkpoint.state.get("run", {}))
        n_images = checkpoint.state.get("n_images", 0)
        if n_images != len(self.images.train):
            now = f"{len(self.images.train):,} images to learn from now"
            raise CheckpointError(f"its data has changed: there were {n_images:,}, and there are {now}")
        self.engine.fabric.strategy.precision.load_state_dict(checkpoint.state.get("precision", {}))
        if self.average is not None:
            self.average.load(checkpoint.part("ema"), self.state.step)
        self.state.ended = ""
        if self.state.planned_for != (self.spec.max_minutes or 0.0):
            self.state.plan = 0  # another bound: it is laid out again
        if self.state.tally and self.engine.first:  # the counts are those of all processes together
            self.tally.restore(self.state.tally)

    @property
    def total(self) -> int:
        """The steps of the whole run."""
        bound = self.recipe.steps or (self.recipe.epochs or 1) * self.per_epoch
        return min(bound, self.state.plan) if self.state.plan else bound

    def run(self) -> State:
        """Train until the end, a wish to stop, or an error."""
        if self.engine.first:
            self.record = Record(self.folder, self.state.reported, self.spec.tensorboard)
        self._started = self._saved = time.monotonic()
        self._before, self._first = self.state.seconds, self.state.step
        self.network.train()
        with together(), self.display.running(self.total, self.state.step):
            while not self.state.ended:
                batches = self.loader.epoch(self.state.epoch, min(self.state.number, len(self.loader)))
                while self.state.number < self.per_epoch and not self._over():
                    if self._look_is_due():
                        self._report(look=True)
                        if self._over():  # by what was seen
                            break
                    self._step(next(batches, None))
                    self._heed()
                self._end_epoch()
        return self.state

    def _over(self) -> bool:
        """Return whether the run has reached one of its bounds, and take note of which."""
        state, spec = self.state, self.spec
        if state.step >= self.total:
            planned = state.plan and state.step >= state.plan
            state.ended = "its time is up" if planned else f"its {'steps' if self.recipe.steps else 'epochs'} are done"
        elif spec.max_minutes is not None and self.engine.most(self._seconds()) >= 60 * spec.max_minutes:
            state.ended = "its time is up"
        elif spec.early_stopping_patience is not None and state.waited >= spec.early_stopping_patience:
            state.ended = f"{state.waited} looks without a better result on the images held out"
        elif spec.target_accuracy is not None and state.best.accuracy >= spec.target_accuracy:
            state.ended = f"{100 * spec.target_accuracy:g} % of the images held out are right"
        return bool(state.ended)

    def _look_is_due(self) -> bool:
        """Return whether it is time for a look inside an epoch; asked before a step, so that a run that goes on from
        here takes a look that it was stopped before or in.
        """
        state = self.state
        return state.number > 0 and state.step % self.look_every == 0 and state.reported != state.step

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    # One step ----------------------------------------------------------------------------------------------

    def _step(self, batch: Batch | None) -> None:
        """Update the weights by a batch, or by this process's share of it."""
        state = self.state
        weight = 1.0
        if batch is None:  # the last batch has fewer images than there are processes: this one has none of them
            batch, weight = self.loader.batch(state.epoch, 0), 0.0
        rest = len(self.images.train) - state.number * self.loader.batch_size
        n_images = min(self.loader.batch_size, rest)  # in the batches of all processes together
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(state.step, state.epoch, self.total)
        chance = step_seed(self.spec.seed, state.step, self.engine.rank)
        torch.manual_seed(chance)
        self.optimizer.zero_grad()
        try:
            for piece, last in _pieces(batch, self.spec.micro_batches):
                with self.engine.fabric.no_backward_sync(self.model, enabled=not last):
                    output = self.model(piece.images, piece.labels)
                    loss = loss_of(self.loss, output, piece, state.step)
                    # The engine takes the mean over processes; images, not processes, are to count alike.
                    share = weight * len(piece.labels) * self.engine.world / n_images
                    self.engine.fabric.backward(loss * share)
                if weight:
                    self.tally.add(output.scores, piece.labels, float(loss.detach()))
        except ValueError as error:
            self._explain(batch, chance, error)
            raise
        self.state.gradient_norm = self._clipped()
        if not (abs(self.state.gradient_norm) < float("inf") and torch.isfinite(self.tally.loss)):
            self._explain(batch, chance, None)
        self.optimizer.step()
        for _ in range(self.recipe.ascents):
            self._ascend(batch, weight, n_images)
        if self.average is not None:
            self.average.update(self.network)
        state.step += 1
        state.number += 1
        self._plan()
        self.display.step(state.step, state.epoch + state.number / self.per_epoch, self.total, self.tally)

    def _clipped(self) -> float:
        """Return the norm of the gradient, after it was shortened to what the run allows."""
        if self.spec.precision == "16-mixed":  # scaled gradients may overflow: the scaler sees to it
            if self.spec.max_grad_norm is not None:
                self.engine.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.spec.max_grad_norm)
            return 0.0
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.spec.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.network.parameters(), self.spec.max_grad_norm, norm)
        return float(norm)

    def _ascend(self, batch: Batch, weight: float, n_images: int) -> None:
        """Take a step of ascent on the routing coefficients: Yang 2021, Algorithm 1."""
        try:
            Quadratic.ascend(
                self.network, batch.images, batch.labels, n_images, lambda slope: self.engine.sum(slope * weight)
            )
        except RoutingDivergence as error:
            raise Diverged(f"step {self.state.step + 1:,}: {error}. {self._kept()}") from error

    def _explain(self, batch: Batch, chance: int, error: Exception | None) -> None:
        """Say where a value that is no number arose, and stop; return where there is none."""
        self.network.zero_grad()
        where = first_nonfinite(self.network, self.loss, batch, self.state.step, chance)
        if where or error is None:
            where = where or "the loss or the gradient of another process"
            raise Diverged(
                f"step {self.state.step + 1:,}: the first value that is no finite number arose in {where}. "
                f"{self._kept()} A lower --optimizer.lr or --max-grad-norm 1 may help"
            ) from error

    def _kept(self) -> str:
        for path in (self.folder.last, self.folder.previous):
            if path.exists():
                return f"The last good checkpoint is {path}."
        return "None was saved yet."

    def _plan(self) -> None:
        """Lay out a schedule over the whole training by the speed of the first steps, where time is the bound."""
        state, minutes = self.state, self.spec.max_minutes
        if state.plan or minutes is None or state.step - self._first != MEASURED or not self._needs_total():
            return
        speed = MEASURED / max(time.monotonic() - self._started, 1e-6)
        left = int((SPARED * 60 * minutes - self._seconds()) * speed)
        state.plan, state.planned_for = int(self.engine.told(state.step + max(1, left))), minutes

    def _needs_total(self) -> bool:
        with contextlib.suppress(ValueError):
            self.recipe.lr_schedule.factor(0, 0, None)
            return False
        return True

    # Between steps -----------------------------------------------------------------------------------------

    def _heed(self) -> None:
        """Save where it is time to, and stop where somebody wants it; all processes together."""
        due = self.engine.first and (
            time.monotonic() - self._saved >= 60 * self.spec.checkpoint_interval_minutes
            or (
                self.spec.checkpoint_interval_steps is not None
                and self.state.step % self.spec.checkpoint_interval_steps == 0
            )
        )
        wish = int(self.engine.most(self.request.signal or 1000 * due))
        if 0 < wish < 1000:
            self._save()
            self._stop(wish)
        if wish:
            self._save()

    def _stop(self, signal: int = 0) -> NoReturn:
        place = f"step {self.state.step:,}, epoch {self.state.epoch + self.state.number / self.per_epoch:.2f}"
        advice = f"Go on with: torchcaps train --resume {self.folder.path}"
        raise RunStopped(f"stopped at {place}; saved. {advice}", signal or self.request.signal)

    def _end_epoch(self) -> None:
        """Close the epoch, or what was done of it where the run is over."""
        state = self.state
        whole = state.number >= self.per_epoch
        if whole:
            self._over()
        due = whole and (state.epoch + 1) % self.spec.eval_interval_epochs == 0
        if state.reported != state.step:
            self._report(look=due or bool(state.ended))
        if whole:
            state.epoch, state.number = state.epoch + 1, 0
        self._save()

    def _report(self, look: bool) -> None:
        """Look at the images held out, write a row, keep the best."""
        self._refuse_nonfinite()
        state = self.state
        epochs = state.epoch + state.number / self.per_epoch
        trained = self.tally.measures(self.engine.sum)
        try:
            found = self._look() if look and self.watch is not None else None
        except _Interrupted:  # what was trained is saved, and the look is taken when the run goes on
            self.network.train()
            self._save()
            self._stop()
        name = "validation" if self.images.held_out is not None else "test"
        if found is not None and name == "validation":
            self._judge(found, epochs)
        row = {
            "epoch": round(epochs, 4),
            "step": state.step,
            "seconds": round(self._seconds(), 1),
            "rate": self.recipe.lr_at(max(0, state.step - 1), state.epoch, self.total),
            "train_loss": trained.loss if trained.n else None,
            "train_accuracy": trained.accuracy if trained.n else None,
            "gradient_norm": self.state.gradient_norm,
        }
        if found is not None:
            row |= {f"{name}_loss": found.loss, f"{name}_accuracy": found.accuracy}
        if self.record is not None:
            self.record.write(**row)
        self.display.row(row, self.recipe.epochs)
        self.tally, state.reported = Tally(self.network), state.step

    def _look(self) -> Measures:
        assert self.watch is not None
        with self._weights_that_count():
            return self._measured(self.watch, self._glance)

    def tested(self, loader: Loader) -> Measures:
        """Look at images with the weights as they are, once the run is over."""
        try:
            return self._measured(loader, self._glance)
        except _Interrupted:
            done = "training is done and saved, the report is not written yet"
            advice = f"Have it written by: torchcaps train --resume {self.folder.path}"
            raise RunStopped(f"{done}. {advice}", self.request.signal) from None

    def _measured(self, loader: Loader, progress: Callable[[], None]) -> Measures:
        """Look at images with the weights as they are, all processes together."""
        # Not through the engine's wrapper, which would wait for processes that have no images left.
        with self.engine.fabric.autocast():
            return evaluate(self.network, loader, self.loss, self.state.step, self.engine.sum, progress)

    def _weights_that_count(self) -> contextlib.AbstractContextManager[None]:
        return self.average.in_place(self.network) if self.average is not None else contextlib.nullcontext()

    def _glance(self) -> None:
        """Break off a look where somebody wants the run to stop; several processes can't do so by themselves."""
        self.display.tick()
        if self.request.signal and self.engine.world == 1:
            raise _Interrupted

    def _judge(self, found: Measures, epochs: float) -> None:
        state = self.state
        if state.best.beaten_by(found.accuracy, found.loss):
            state.best, state.waited = Best(found.accuracy, found.loss, state.step, epochs), 0
            if self.engine.first:
                with self._weights_that_count():
                    self._write(self.folder.best, prefixed("model", self.network.state_dict()))
        else:
            state.waited += 1

    def _save(self) -> None:
        """Write where the run stands; all processes come here together."""
        self._refuse_nonfinite()
        tally = Tally(self.network)
        tally.counts, tally.loss = self.engine.sum(self.tally.counts), self.engine.sum(self.tally.loss)
        self.state.tally = tally.plain()
        self.state.seconds = self._seconds()
        if self.engine.first:
            tensors = prefixed("model", self.network.state_dict())
            tensors |= prefixed("optimizer", optimizer_tensors(self.optimizer.optimizer))
            if self.average is not None:
                tensors |= prefixed("ema", self.average.tensors)
            self._write(self.folder.last, tensors)
        self._saved = time.monotonic()

    def _refuse_nonfinite(self) -> None:
        """Stop where weights are no numbers: they must not take the place of good ones."""
        for name, tensor in self.network.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise Diverged(
                    f"step {self.state.step:,}: the first value that is no finite number arose in the weights {name}, "
                    f"when the optimiser changed them. {self._kept()} A lower --optimizer.lr may help"
                )

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        means = [step.mean for step in self.images.pipeline.steps(False) if isinstance(step, MeanImage)]
        tensors |= {f"pipeline.{n}": mean for n, mean in enumerate(means) if mean is not None}
        state = {
            "run": self.state.plain(),
            "config": self.spec.to_plain(),
            "classes": list(self.images.train.classes),
            "n_images": len(self.images.train),
            "precision": self.engine.fabric.strategy.precision.state_dict(),  # the scale of half precision
        }
        try:
            write_checkpoint(path, tensors, state, self.folder.previous if path == self.folder.last else None)
        except RunError as error:
            go_on = f"Make room, then go on with: torchcaps train --resume {self.folder.path}"
            raise RunError(f"{error}. {self._kept()} {go_on}") from error


class _Interrupted(Exception):
    """Somebody wants the run to stop while it looks at images."""


def _pieces(batch: Batch, count: int) -> Iterator[tuple[Batch, bool]]:
    """Give a batch in pieces, and whether it is the last of them."""
    if count == 1:
        yield batch, True
        return
    parts = [part.chunk(count) for part in (batch.images, batch.labels, batch.targets, batch.indices)]
    for number, piece in enumerate(zip(*parts, strict=True)):
        yield Batch(*piece), number == len(parts[0]) - 1
