"""Training steps of whole models: eager, compiled by ``torch.compile``, and under bfloat16 autocast."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from torchcaps._core.machine import native_bfloat16
from torchcaps.bench.cases import Work
from torchcaps.bench.timing import num_threads, shortest_seconds
from torchcaps.models import create_model

__all__ = ["STEP_MODELS", "measure_steps"]

STEP_MODELS = {"sabour2017_mnist": 32, "tsai2020_cifar10": 16, "choi2019_mnist": 32}  # batch sizes
VARIANTS = ("eager", "compiled", "bf16-mixed")


def measure_steps(repeat: int = 3, models: dict[str, int] = STEP_MODELS) -> Iterator[dict[str, Any]]:
    """Yield a row per model: CPU time of a training step on one thread for each variant, interleaved.

    ``"compiled"`` compiles forward pass and loss, hence also backward, and the optimiser's step. ``"bf16-mixed"`` is
    ``--precision bf16-mixed``: capsule layers compute in float32.

    Args:
        repeat: number of repetitions, of which the shortest counts.
        models: batch size by name of the model.
    """
    for name, batch_size in models.items():
        with num_threads(1):
            works, warm_up = {}, {}
            for variant in VARIANTS:
                works[variant] = _make_step(name, batch_size, variant)
                start = time.process_time()
                works[variant].run()
                warm_up[variant] = time.process_time() - start
            seconds = shortest_seconds(works, repeat, time.process_time)
        yield {
            "kind": "step",
            "model": name,
            "batch_size": batch_size,
            "cpu_seconds": seconds,
            "first_seconds": warm_up,
            "native_bfloat16": native_bfloat16(),
        }


def _make_step(name: str, batch_size: int, variant: str) -> Work:
    """Return a training step of a model on random images; all variants start from equal weights."""
    torch.manual_seed(0)
    model = create_model(name).train()
    loss, optimizer = model.loss(), model.recipe.optimizer.make(model.parameters())
    images = torch.rand(batch_size, *model.spec.image, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(batch_size) % model.spec.classes

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "bf16-mixed"):
            output = model(images, labels)
        return loss(output, labels, images)

    update: Any = optimizer.step
    if variant == "compiled":
        forward, update = torch.compile(forward), torch.compile(update)

    def step() -> list[torch.Tensor]:
        """Run one training step; return its loss."""
        optimizer.zero_grad()
        value = forward()
        value.backward()
        update()
        return [value.detach()]

    return Work(step, 0)
