"""Comparison of an exported file with the module that it was exported from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchcaps.export.program import BATCH_SIZES

__all__ = ["MAX_DIFFERENCE", "Parity", "ParityError", "check_parity"]

MAX_DIFFERENCE = 1e-4  # times max(1, |y|)


class ParityError(RuntimeError):
    """An exported program computes other values than the module; no file is written.

    >>> from torchcaps.export.parity import check_parity
    >>> class Double(nn.Module):
    ...     def forward(self, x):
    ...         return {"y": 2 * x}
    >>> try:
    ...     check_parity(Double(), lambda inputs: {"y": 3 * inputs["x"]}, {"x": torch.ones(2, 3)})
    ... except ParityError:
    ...     print("other values")
    other values
    """


@dataclass(frozen=True)
class Parity:
    """Result of a comparison.

    Args:
        difference: largest difference of an output value ``y``, divided by ``max(1, |y|)``.
        output: name of the output with this difference.
        batch_sizes: the numbers of images that were compared.

    >>> Parity(difference=2e-7, output="scores", batch_sizes=(1, 5)).output
    'scores'
    """

    difference: float
    output: str
    batch_sizes: tuple[int, ...]


def check_parity(
    module: nn.Module,
    run: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    inputs: dict[str, Tensor],
    limit: float = MAX_DIFFERENCE,
) -> Parity:
    """Compare all outputs at two batch sizes; raise a `ParityError` if one differs by more than the limit.

    Args:
        module: the module, whose output is a dict of tensors.
        run: the exported program.
        inputs: inputs by name.
        limit: largest accepted difference, relative to ``max(1, |y|)``.
    """
    worst = Parity(0.0, "", BATCH_SIZES)
    for size in BATCH_SIZES:
        part = {name: tensor[:size] for name, tensor in inputs.items()}
        with torch.no_grad():
            expected = module(**part)
        found = run(part)
        for name, value in expected.items():
            if name not in found or found[name].shape != value.shape:
                shape = list(found[name].shape) if name in found else "missing"
                raise ParityError(f"output {name!r} of the exported program is {shape}, expected {list(value.shape)}")
            if not bool(torch.isfinite(value).all()):
                raise ParityError(f"output {name!r} of the module is NaN or infinite: the file was not written")
            difference = (found[name].double() - value.double()).abs() / value.double().abs().clamp(min=1)
            largest = float(difference.max()) if difference.numel() else 0.0
            if not largest <= limit:  # also for NaN
                raise ParityError(
                    f"output {name!r} of the exported program differs by {largest:.1e} for {size} images, more than "
                    f"{limit:g}: the file was not written"
                )
            if largest >= worst.difference:
                worst = Parity(largest, name, BATCH_SIZES)
    return worst
