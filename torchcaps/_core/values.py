"""Values of tensors in argument checks: whether they can be read, and when.

Inside a compiled graph, on the meta device and inside ``torch.vmap`` there are no values to read: checks are skipped.
On an accelerator, reading a value waits until the device has finished everything before it. Checks of layers therefore
don't read there; inside `deferred_checks` they are collected and read together, once.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = [
    "check_value",
    "copy_to_host",
    "deferred_checks",
    "in_vmap_or_forward_mode",
    "index_of_first",
    "is_batched",
    "is_host",
    "is_readable",
    "read_values",
]

Describe = Callable[[float], Exception | None]  # the error for a value; None if the value is accepted
HOST_DEVICES = ("cpu", "meta")


class _Collected(threading.local):
    """Checks of this thread inside `deferred_checks`; ``None`` outside."""

    checks: list[tuple[Tensor, Describe]] | None = None


_collected = _Collected()


def is_readable(*tensors: Tensor) -> bool:
    """Return whether the values of tensors can be read: not in a compiled graph, on the meta device or inside vmap."""
    return not torch.compiler.is_compiling() and not any(t.is_meta or is_batched(t) for t in tensors)


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is inside ``vmap``, where its values can't be read."""
    functorch = torch._C._functorch  # type: ignore[attr-defined]
    if functorch.is_legacy_batchedtensor(tensor):  # torch.autograd.grad(..., is_grads_batched=True)
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def in_vmap_or_forward_mode() -> bool:
    """Return whether the code runs inside ``torch.vmap`` or forward-mode differentiation (``torch.func.jvp``).

    >>> torch.vmap(lambda x: x + in_vmap_or_forward_mode())(torch.zeros(2))
    tensor([1., 1.])
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    functorch = torch._C._functorch  # type: ignore[attr-defined]
    kinds = (functorch.TransformType.Vmap, functorch.TransformType.Jvp)
    return any(interpreter.key() in kinds for interpreter in functorch.get_interpreter_stack() or ())


def in_transform() -> bool:
    """Return whether the code runs inside a transform of ``torch.func`` or forward-mode differentiation.

    >>> torch.func.grad(lambda x: x * in_transform())(torch.tensor(3.0))
    tensor(1.)
    """
    interpreters = torch._C._functorch.get_interpreter_stack()  # type: ignore[attr-defined]
    return bool(interpreters) or torch.autograd.forward_ad._current_level >= 0


# As torch.compiler.assume_constant_result, which would import the compiler: torch.compile calls the function while it
# traces, inside the same transforms, and compiles again if they change.
in_vmap_or_forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_value(
    measure: Callable[[], Tensor], describe: Describe, device: torch.device, required: bool = False
) -> None:
    """Raise the error that describes a value, if there is one.

    Args:
        measure: computes the value, a tensor with one element.
        describe: returns the error for a value, or ``None``.
        device: device of the value. On an accelerator the check is deferred inside of `deferred_checks`.
        required: outside of it, read the value on an accelerator, too; by default the check is skipped.
    """
    deferred = None if is_host(device) else _collected.checks
    if deferred is not None:
        deferred.append((measure(), describe))
    elif required or is_host(device):
        error = describe(float(measure()))
        if error is not None:
            raise error


def index_of_first(flags: Tensor) -> Tensor:
    """Return the index of the first true element of a flattened tensor, -1 if there is none, without reading a value.

    >>> index_of_first(torch.tensor([False, True, True])), index_of_first(torch.tensor([False]))
    (tensor(1), tensor(-1))
    """
    if flags.numel() == 0:
        return torch.full((), -1, device=flags.device)
    flags = flags.flatten()
    return torch.where(flags.any(), flags.to(torch.uint8).argmax(), -1)


def is_host(device: torch.device) -> bool:
    """Return whether values of tensors on a device can be read without waiting for it."""
    return device.type in HOST_DEVICES


class _DeferredChecks(AbstractContextManager[None]):
    """See `deferred_checks`."""

    def __enter__(self) -> None:
        self.is_outermost = _collected.checks is None
        if self.is_outermost:
            _collected.checks = []

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if not self.is_outermost:
            return
        try:
            if kind is None:
                read_values()
        finally:
            _collected.checks = None


def read_values(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors to the host, with the checks collected in `deferred_checks` so far, in one synchronisation.

    Raises the error of the first check that fails. Tensors on the host are returned as they are.

    >>> read_values(torch.tensor([1.0, 2.0]), torch.tensor(3))
    [tensor([1., 2.]), tensor(3)]
    """
    checks, results = _collected.checks or [], [tensor.detach() for tensor in tensors]
    remote = [value.detach() for value, _ in checks] + [t for t in results if not is_host(t.device)]
    if not remote:
        return results
    device = remote[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    flat = copy_to_host(torch.cat([tensor.reshape(-1).to(device, dtype) for tensor in remote]))
    parts = [p.view(t.shape).to(t.dtype) for p, t in zip(flat.split([t.numel() for t in remote]), remote, strict=True)]
    if _collected.checks:
        _collected.checks = []
    for value, (_, describe) in zip(flat[: len(checks)].tolist(), checks, strict=True):
        error = describe(value)
        if error is not None:
            raise error
    copies = iter(parts[len(checks) :])
    return [t if is_host(t.device) else next(copies) for t in results]


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host: this waits until its device has finished."""
    return tensor.cpu()


def deferred_checks() -> AbstractContextManager[None]:
    """Context manager that reads the values of all checks on an accelerator at its end, in one synchronisation.

    A layer rejects non-finite capsules at once on a CPU. On an accelerator it does so only inside of this context, in
    which every `torchcaps.models.Network` runs its forward pass; use it around a model of your own:

    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(6, 4, 3, 4, routing="dynamic")
    >>> with deferred_checks():
    ...     parents = layer(torch.randn(2, 6, 4))
    """
    return nullcontext() if torch.compiler.is_compiling() else _DeferredChecks()
