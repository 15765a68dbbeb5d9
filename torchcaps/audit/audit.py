"""`audit`: examine any module by its behaviour."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.audit import checks, layers
from torchcaps.audit.layers import Strides
from torchcaps.audit.own import claims_of, example_labels
from torchcaps.audit.probe import AuditArgumentError, Probe, one_line
from torchcaps.audit.report import AuditReport, AuditVerdict, Finding
from torchcaps.models import Network

__all__ = ["audit"]

# Checks that compare outputs of several calls, which means nothing if the outputs are random.
COMPARED = (
    "batch_independence",
    "batch_of_one",
    "permutation_invariance",
    "translation_equivariance",
    "decoder_labels",
)
Couplings = Callable[[nn.Module, Tensor], Tensor | Sequence[Tensor]]


def audit(
    module: nn.Module,
    example_input: Tensor,
    *,
    labels: Tensor | None = None,
    permuted: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    translated: Strides | None = None,
    primary: str | None = None,
    couplings: Couplings | None = None,
    coupling_axis: int = -1,
    lengths: Callable[[Any], Tensor] | None = None,
    unclaimed: Mapping[str, str] | None = None,
) -> AuditReport:
    """Examine a module for the known mistakes of capsule networks, by its behaviour: any ``torch.nn.Module``.

    The module is copied and not changed. Models and layers of torchcaps provide all arguments but the example
    themselves, and declare the invariants that they lack; these are listed as "not claimed" with the reason.

    Args:
        module: the module. It is called as ``module(images)``, in training with labels, if they are given, as
            ``module(images, labels)``. Its output may be a tensor or any structure of tensors.
        example_input: images, at least two.
        labels: labels of the images, if the module takes them.
        permuted: names of layers whose input is ``[B, children, ...]`` and that should not depend on the order of the
            children, each with the axes of children of its parameters: ``{"digits": {"weight": [0]}}``. Without
            parameters, the children are on the second axis.
        translated: names of convolutional layers with their stride: ``{"caps1": 2}``. The axes of the grid may be in
            any position, rows before columns.
        primary: name of the primary capsule layer, with input ``[B, C, H, W]``. The empty name is the module itself.
        couplings: function of module and images that returns couplings, if the module can provide them.
        coupling_axis: axis over which they are claimed to sum to 1.
        lengths: function of the output that returns values that are claimed to be in ``[0, 1)``.
        unclaimed: reasons for invariants that the module lacks, by name of the check.

    >>> import torch, torchcaps
    >>> report = audit(torchcaps.create_model("capsnet_small", width=8, types=2), torch.rand(3, 1, 28, 28))
    >>> report.passed, report["coupling_sums"].verdict.value
    (True, 'passed')
    """
    is_given = labels is not None
    if labels is None and isinstance(module, Network):
        labels = example_labels(module, len(example_input))
    probe = Probe(module, example_input, labels)
    probe.check_call(with_labels=is_given)
    claims = claims_of(module)
    given = {"permutation_invariance": permuted, "translation_equivariance": translated, "primary_positions": primary}
    given |= {"coupling_sums": couplings, "length_range": lengths}
    own = {check: reason for check, reason in claims.unclaimed.items() if given.get(check) is None}
    reasons = {**own, **(unclaimed or {})}
    permuted = {**claims.permuted, **(permuted or {})}
    translated = {**claims.translated, **(translated or {})}
    primary = claims.primary if primary is None else primary
    lengths = lengths or claims.lengths
    named = _named_couplings(couplings, coupling_axis) or claims.couplings
    decodes = labels is not None
    missing = {
        "permutation_invariance": None if permuted else "no layer was named: pass permuted=",
        "translation_equivariance": None if translated else "no layer was named: pass translated=",
        "primary_positions": None if primary is not None else "no layer was named: pass primary=",
        "coupling_sums": None if named else "no couplings: pass couplings=",
        "decoder_labels": None if decodes else "the module was called without labels: pass labels=",
        "length_range": None if lengths else "no lengths: pass lengths=",
    }
    calls: dict[str, Callable[[], Finding]] = {
        "determinism": lambda: checks.determinism(probe),
        "batch_independence": lambda: checks.batch_independence(probe),
        "batch_of_one": lambda: checks.batch_of_one(probe),
        "finite_values": lambda: checks.finite_values(probe),
        "parameter_gradients": lambda: checks.parameter_gradients(probe),
        "permutation_invariance": lambda: layers.permutation_invariance(probe, permuted),
        "translation_equivariance": lambda: layers.translation_equivariance(probe, translated),
        "primary_positions": lambda: layers.primary_positions(probe, str(primary)),
        "coupling_sums": lambda: checks.coupling_sums(_evaluate_couplings(probe, named)),
        "decoder_labels": lambda: checks.decoder_labels(probe),
        "length_range": lambda: checks.length_range(probe, _checked_lengths(lengths)),
    }
    unknown = set(reasons) - set(calls)
    if unknown:
        raise AuditArgumentError(
            f"unclaimed must have names of checks as keys, got {min(unknown)!r}: {', '.join(calls)}"
        )
    findings = []
    for name, call in calls.items():
        if name in reasons:
            findings.append(Finding(name, AuditVerdict.NOT_CLAIMED, "", reasons[name], ""))
        elif missing.get(name) is not None:
            findings.append(Finding(name, AuditVerdict.NOT_CHECKED, "", str(missing[name]), ""))
        elif name in COMPARED and findings[0].verdict is AuditVerdict.FAILED:
            findings.append(Finding(name, AuditVerdict.NOT_CHECKED, "", "outputs are random: see determinism", ""))
        else:
            findings.append(_run(name, call))
    return AuditReport(getattr(module, "name", None) or type(module).__name__, tuple(findings))


def _run(name: str, call: Callable[[], Finding]) -> Finding:
    """Run a check. An exception of the module, which worked with the example, is a failure."""
    try:
        return call()
    except AuditArgumentError:
        raise
    except Exception as error:
        tried = "ran the check, after the module had worked with the example"
        why = "code that fails for some inputs, or in training mode, fails in use"
        return Finding(name, AuditVerdict.FAILED, tried, one_line(error), why)


def _named_couplings(couplings: Couplings | None, axis: int) -> Any:
    """Return a function that returns name, tensor and ``axis`` of each of the ``couplings``; ``None`` for ``None``."""
    if couplings is None:
        return None

    def named(module: nn.Module, images: Tensor) -> list[tuple[str, Tensor, int]]:
        """Return name, tensor and axis of each tensor of couplings; raise an `AuditArgumentError` if invalid."""
        try:
            value = couplings(module, images)
        except Exception as error:
            raise AuditArgumentError(f"couplings(module, images) failed: {one_line(error)}") from error
        tensors = list(value) if isinstance(value, Iterable) and not isinstance(value, Tensor) else [value]
        if not tensors or any(not isinstance(x, Tensor) or not -x.dim() <= axis < x.dim() for x in tensors):
            got = ", ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in tensors)
            raise AuditArgumentError(
                f"couplings must return tensors that have the axis coupling_axis={axis}, got {got or None}"
            )
        return [(f"couplings {index}", tensor, axis) for index, tensor in enumerate(tensors, start=1)]

    return named


def _checked_lengths(lengths: Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor]:
    """Return the function, with a ValueError for values that are not a floating-point tensor."""
    assert lengths is not None

    def checked(output: Any) -> Tensor:
        """Return the lengths of an output; raise an `AuditArgumentError` if they are not floating-point."""
        try:
            value = lengths(output)
        except Exception as error:
            raise AuditArgumentError(f"lengths(output) failed: {one_line(error)}") from error
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            raise AuditArgumentError(f"lengths must return a floating-point tensor, got {type(value).__name__}")
        return value

    return checked


def _evaluate_couplings(probe: Probe, couplings: Any) -> list[tuple[str, Tensor, int]]:
    probe.module.eval()
    with torch.no_grad():
        return couplings(probe.module, probe.example.clone())
