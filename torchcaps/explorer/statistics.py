"""Statistics over the test images of a run, computed in the background while the page is open."""

import threading
import time
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.common import multi_hot_labels
from torchcaps.analysis.couplings import coupling_maps
from torchcaps.analysis.dead import dead_capsules
from torchcaps.explorer.arrays import encode_array
from torchcaps.explorer.session import ExploredRun, compute_lock

__all__ = ["Statistics"]

BATCH_SIZE = 25  # small, so that a request never waits long for the lock
PAUSE_S = 0.01  # between batches: the lock is not fair, and a request waits for it
TRACED_IMAGES = 100  # for couplings and dead capsules
BINS = 20
MAX_CONFUSION_CLASSES = 200


class _StoppedError(Exception):
    """The server stops while an analysis runs."""


class Statistics:
    """Predictions for all test images, and from a part of them dead capsules and coupling entropy.

    `start` computes them in a thread; until then, samples are in the order of the data set.
    """

    def __init__(self, run: ExploredRun) -> None:
        self.run = run
        self.n_done = 0
        self.problem = ""
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self.probabilities: Tensor = torch.zeros(0)
        self.true: Tensor = torch.zeros(0)
        self.predicted: Tensor = torch.zeros(0)
        self.summary: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        """Whether everything is computed."""
        return self._ready.is_set()

    def start(self) -> None:
        """Compute in a background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchcaps-statistics", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def wait(self) -> None:
        """Compute now, or wait for the thread."""
        if self._thread is None:
            self._run()
        else:
            self._ready.wait()

    def _run(self) -> None:
        """Compute everything, and set `ready` at the end; the text of an error is stored as ``problem``."""
        try:
            self._compute()
        except _StoppedError:
            pass
        except Exception as error:  # shown on the page; the other panels still work
            self.problem = f"statistics are not available: {error}"
        self._ready.set()

    @property
    def _batch_size(self) -> int:
        """Images per forward pass, limited if the settings of the run ask for much memory."""
        limit = self.run.run.max_batch_size
        return BATCH_SIZE if limit is None else min(BATCH_SIZE, limit)

    def _compute(self) -> None:
        """Predict the test images batch by batch, then compute the summary; return early if stopped."""
        run = self.run
        probabilities, true, predicted = [], [], []
        for start in range(0, run.n_samples, self._batch_size):
            if self._stop.is_set():
                return
            images, labels = run.sample(list(range(start, min(start + self._batch_size, run.n_samples))))
            with compute_lock, torch.no_grad():
                scores = run.pixels(images).scores.float()
                probabilities.append(run.model.probabilities(scores))
                predicted.append(run.model.predict_multi_hot(scores))
            true.append(multi_hot_labels(run.model, labels).bool())
            self.n_done = start + len(images)
            self._stop.wait(PAUSE_S)
        if probabilities:
            self.probabilities, self.true = torch.cat(probabilities), torch.cat(true)
            self.predicted = torch.cat(predicted)
            self.summary = self._summarize()

    # Samples ----------------------------------------------------------------------------------------------------

    def order(self, sort: str, true: int | None = None, predicted: int | None = None) -> list[int]:
        """Return indices of test images.

        Args:
            sort: ``"index"``; ``"error"``: the most confident errors first; ``"uncertainty"``: the smallest difference
                between the two highest probabilities first.
            true: only images with this label.
            predicted: only images with this prediction.
        """
        if not self.ready or not len(self.probabilities):
            return list(range(self.run.n_samples))
        keep = torch.ones(len(self.true), dtype=torch.bool)
        for classes, index in ((self.true, true), (self.predicted, predicted)):
            if index is not None:
                keep &= classes[:, index] if index < classes.shape[1] else False
        indices = keep.nonzero()[:, 0]
        if sort == "index":
            return indices.tolist()
        values = self.error() if sort == "error" else -self.margin()
        return indices[values[indices].argsort(descending=True, stable=True)].tolist()

    def error(self) -> Tensor:
        """Return the highest probability of an absent class minus the lowest one of a present class, ``[N]``."""
        absent = torch.where(self.true, -torch.inf, self.probabilities).amax(1)
        present = torch.where(self.true, self.probabilities, torch.inf).amin(1)
        return torch.where(self.true.any(1) & ~self.true.all(1), absent - present, 0)

    def margin(self) -> Tensor:
        """Return the distance of the prediction to another one, ``[N]``: between the classes at its boundary."""
        if self.run.model.n_objects is None:
            return (self.probabilities - 0.5).abs().amin(1)
        ordered = self.probabilities.sort(dim=1, descending=True).values
        n = min(self.run.model.n_objects, ordered.shape[1] - 1)
        return ordered[:, n - 1] - ordered[:, n]

    def describe_sample(self, index: int, image: Tensor, labels: list[int]) -> dict[str, Any]:
        """Return a test image with label and, if known, prediction."""
        known = self.ready and index < len(self.probabilities)
        return {
            "index": index,
            "image": encode_array((image * 255).round().clamp(0, 255), "uint8"),
            "labels": labels,
            "predicted": self.predicted[index].nonzero()[:, 0].tolist() if known else None,
        }

    # Summary ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the state of the computation and, once it is finished, the summary."""
        return {
            "ready": self.ready,
            "done": self.n_done,
            "total": self.run.n_samples,
            "problem": self.problem or self.run.why_no_samples,
            "summary": self.summary if self.ready and self.summary else None,
        }

    def _summarize(self) -> dict[str, Any]:
        """Return counts, confusion matrix, score histograms, coupling entropy and dead capsules for the page."""
        summary: dict[str, Any] = {
            "n": len(self.true),
            "n_correct": int((self.true == self.predicted).all(1).sum()),
            "confusion": self._confusion(),
            "histogram": self._histogram(),
            "layers": [],
            "dead": [],
            "n_traced": 0,
            "why_no_layers": self.run.missing_parts().get("capsules", ""),
        }
        network = self.run.capsules
        if network is not None and not self._stop.is_set():
            images, _ = self.run.sample(list(range(min(TRACED_IMAGES, self.run.n_samples))))
            prepared = self._preprocess(images)
            summary["n_traced"] = len(images)
            with compute_lock:
                maps = coupling_maps(
                    network, prepared, n_kept=0, batch_size=self._batch_size, progress=self._yield_lock
                )
            for layer in maps.layers:
                mean = None if layer.entropy is None else layer.entropy.mean(0).tolist()
                summary["layers"].append({"name": layer.name, "entropy": mean, "why": layer.why_no_entropy})
            try:
                with compute_lock:
                    dead = dead_capsules(network, prepared, batch_size=self._batch_size, progress=self._yield_lock)
            except ValueError as error:
                summary["dead"] = [{"name": "all layers", "n": 0, "n_dead": 0, "why": str(error)}]
            else:
                summary["dead"] = [
                    {"name": layer.name, "n": layer.n, "n_dead": layer.n_dead, "why": layer.why}
                    for layer in dead.layers
                ]
        return summary

    def _yield_lock(self) -> None:
        """Let a waiting request compute, between two batches of an analysis; end the analysis if the server stops."""
        compute_lock.release()
        try:
            time.sleep(PAUSE_S)
        finally:
            compute_lock.acquire()
        if self._stop.is_set():
            raise _StoppedError

    def _preprocess(self, images: Tensor) -> Tensor:
        """Return the input of the network itself for pixels in 0..1."""
        prepared: list[Tensor] = []
        with compute_lock, torch.no_grad():
            handle = self.run.model.register_forward_pre_hook(lambda module, inputs: prepared.append(inputs[0]))
            try:
                self.run.pixels(images)
            finally:
                handle.remove()
        return prepared[0]

    def _confusion(self) -> dict[str, Any] | None:
        """Return counts of (label, prediction); with several objects per image, labels missed and classes added."""
        n_classes = self.true.shape[1]
        if n_classes > MAX_CONFUSION_CLASSES:
            return None
        counts = torch.zeros(n_classes, n_classes, dtype=torch.int64)
        for true, predicted in zip(self.true, self.predicted, strict=True):
            both = true & predicted
            for index in both.nonzero()[:, 0].tolist():
                counts[index, index] += 1
            for label in (true & ~predicted).nonzero()[:, 0].tolist():
                for other in (predicted & ~true).nonzero()[:, 0].tolist():
                    counts[label, other] += 1
        return {"counts": counts.tolist()}

    def _histogram(self) -> dict[str, Any]:
        """Return histograms of the scores of present and of absent classes."""
        present, absent = self.probabilities[self.true], self.probabilities[~self.true]
        return {
            "bins": BINS,
            "present": torch.histc(present, BINS, 0, 1).int().tolist(),
            "absent": torch.histc(absent, BINS, 0, 1).int().tolist(),
        }
