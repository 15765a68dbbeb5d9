"""The checks of an audit. Each tries one thing and returns a `Finding`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.audit.probe import MAX_DIFFERENCE, Probe, largest_difference
from torchcaps.audit.report import Finding, make_finding

__all__ = [
    "batch_independence",
    "batch_of_one",
    "coupling_sums",
    "decoder_labels",
    "determinism",
    "finite_values",
    "length_range",
    "parameter_gradients",
]

MAX_BATCH_EFFECT = 1e-6  # of the other images: the arithmetic is the same
SCALES = {"zero": 0.0, "tiny": 1e-30, "large": 1e3}


def batch_independence(probe: Probe) -> Finding:
    """Replace all images of a batch but the first, and differentiate its outputs by them: both must give nothing.

    The derivative also finds an influence that is still small because the weights are.
    """
    images = probe.example
    others = torch.cat([images[:1], 1 - images[1:].flip(0)])
    difference = largest_difference([t[:1] for t in probe.evaluate(others)], [t[:1] for t in probe.evaluate(images)])
    images = images.clone().requires_grad_()
    outputs = [t[:1] for t in probe.outputs(probe.call(images, None), len(images)) if t.requires_grad]
    gradient = 0.0
    if outputs:
        (found,) = torch.autograd.grad(_functional(outputs), images, allow_unused=True)
        gradient = 0.0 if found is None else float(found[1:].abs().max())
    return make_finding(
        "batch_independence",
        difference <= MAX_BATCH_EFFECT and not gradient > 0,
        "replaced all images of a batch but the first, and differentiated its outputs by them, in evaluation mode",
        f"the outputs of the first image change by {difference:.1e}; their derivative by the others is {gradient:.1e}",
        "the prediction for an image must not depend on the images that happen to be evaluated with it",
        difference=difference,
        gradient=gradient,
    )


def batch_of_one(probe: Probe) -> Finding:
    """Evaluate one image alone; it must work and give the same outputs as in a batch."""
    tried = "evaluated the first image alone and in a batch"
    why = "a squeeze() or a view with a fixed batch size fails for single images, or in the last batch of an epoch"
    expected = [t[:1] for t in probe.evaluate(probe.example)]
    try:
        found = probe.evaluate(probe.example[:1])
    except Exception as error:
        return make_finding("batch_of_one", False, tried, f"{type(error).__name__}: {str(error)[:100]}", why)
    if len(found) != len(expected):
        return make_finding("batch_of_one", False, tried, "an output has lost its batch axis", why)
    difference = largest_difference(found, expected)
    result = f"the outputs differ by {difference:.1e}"
    return make_finding("batch_of_one", difference <= MAX_DIFFERENCE, tried, result, why, difference=difference)


def determinism(probe: Probe) -> Finding:
    """Evaluate the same batch twice, and in a new copy after other images; the outputs must be bit-equal."""
    first, second = probe.evaluate(probe.example), probe.evaluate(probe.example)
    difference = largest_difference(second, first)
    copied = probe.restart()
    copied.evaluate(1 - probe.example)
    history = largest_difference(copied.evaluate(probe.example), probe.restart().evaluate(probe.example))
    result = f"the outputs differ by {difference:.1e}"
    if history:
        result += f", and after other images by {history:.1e}"
    return make_finding(
        "determinism",
        difference == 0 and history == 0,
        "evaluated the same batch twice, and after other images, in evaluation mode",
        result,
        "dropout, random couplings, or couplings kept from earlier images make reported accuracies irreproducible",
        difference=difference,
        history=history,
    )


def finite_values(probe: Probe) -> Finding:
    """Compute outputs and gradients for zero, tiny and large inputs; all must be finite.

    Zeros are also tried without biases, as they are often initialised: only then are poses exactly zero.
    """
    problems, rejected = [], []
    unbiased = Probe(probe.module, probe.example, probe.labels)
    unbiased.needs_labels = probe.needs_labels
    with torch.no_grad():
        for name, parameter in unbiased.module.named_parameters():
            last = name.rpartition(".")[2]
            if last == "b" or "bias" in last:
                parameter.zero_()
    cases = [(name, scale, probe) for name, scale in SCALES.items()]
    for name, scale, tried in [("example", 1.0, probe), *cases, ("zero without biases", 0.0, unbiased)]:
        tried.module.eval()
        images = (tried.example * scale).requires_grad_()
        try:
            outputs = tried.outputs(tried.call(images, None), len(images))
        except ValueError as error:  # a module may reject inputs outside of its domain
            rejected.append(f"{name}: rejected ({str(error)[:60]})")
            continue
        bad = sum(int((~torch.isfinite(t)).sum()) for t in outputs)
        leaves = [images, *(p for p in tried.module.parameters() if p.requires_grad)]
        differentiable = [t for t in outputs if t.requires_grad]
        gradients = (
            torch.autograd.grad(_functional(differentiable), leaves, allow_unused=True) if differentiable else ()
        )
        bad_gradients = sum(int((~torch.isfinite(g)).sum()) for g in gradients if g is not None)
        if bad or bad_gradients:
            problems.append(f"{name}: {bad} values and {bad_gradients} gradient values are NaN or infinite")
    return make_finding(
        "finite_values",
        not problems,
        "outputs and gradients for the example, for zeros (also with all biases at zero), scaled by 1e-30 and by 1,000",
        "; ".join(problems or rejected) or "all finite",
        "the norm in the squash is NaN at zero without care: one black image then destroys all weights",
        n_problems=len(problems),
    )


def parameter_gradients(probe: Probe) -> Finding:
    """Compute gradients in training mode; each parameter must receive one that is not zero."""
    module = probe.module.train()
    module.zero_grad()
    outputs = probe.outputs(probe.call(probe.example, probe.labels), len(probe.example))
    differentiable = [t for t in outputs if t.requires_grad]
    if differentiable:
        _functional(differentiable).backward()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for name, p in parameters.items() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    module.zero_grad()
    result = f"{len(missing)} of {len(parameters)} parameters receive none: {', '.join(missing[:4])}"
    return make_finding(
        "parameter_gradients",
        not missing,
        "gradients of a random functional of all outputs, in training mode",
        result if missing else f"all {len(parameters)} trainable parameters receive one",
        "a detached branch or an unused layer is never trained, and the parameter count is wrong",
        n_missing=len(missing),
        n_parameters=len(parameters),
    )


def _functional(outputs: list[Tensor]) -> Tensor:
    """Return a random linear functional of tensors."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for tensor in outputs:
        total = total + (tensor.float() * torch.randn(tensor.shape, generator=generator)).sum()
    return total


def coupling_sums(couplings: Sequence[tuple[str, Tensor, int]]) -> Finding:
    """Sum couplings over the claimed axis; the sums must be 1.

    Args:
        couplings: name, tensor and axis of each.
    """
    largest, worst, least = 0.0, "", math.inf
    for name, tensor, axis in couplings:
        total = tensor.detach().double().sum(axis)
        difference = largest_difference([total], [torch.ones_like(total)])
        least = min(least, float(tensor.min()))
        if difference >= largest:
            largest, worst = difference, name
    axes = ", ".join(sorted({str(axis) for _, _, axis in couplings}))
    return make_finding(
        "coupling_sums",
        largest <= MAX_DIFFERENCE and least >= 0,
        f"summed {len(couplings)} tensors of couplings over the claimed axis ({axes})",
        f"sums differ from 1 by {largest:.1e} ({worst}); the least coupling is {least:.1e}",
        "a softmax over the wrong axis makes children compete for a parent instead of parents for a child",
        difference=largest,
        least=least,
    )


def decoder_labels(probe: Probe) -> Finding:
    """Evaluate with other labels; no output may change."""
    assert probe.labels is not None
    labels = probe.labels
    other = labels.flip(0) if not torch.equal(labels.flip(0), labels) else labels.roll(1, 0)
    difference = largest_difference(probe.evaluate(probe.example, other), probe.evaluate(probe.example, labels))
    result = f"the outputs change by {difference:.1e}"
    if difference and not probe.needs_labels:
        result += " (harmless if no evaluation passes labels: the module also works without)"
    return make_finding(
        "decoder_labels",
        difference == 0,
        "exchanged the labels in evaluation mode",
        result,
        "a decoder that is masked by the label at test time shows reconstructions that the network could not know",
        difference=difference,
    )


def length_range(probe: Probe, lengths: Callable[[Any], Tensor]) -> Finding:
    """Compute lengths for several scales of the input; they must be in [0, 1)."""
    least, most, problems = math.inf, -math.inf, []
    probe.module.eval()
    for name, scale in {"example": 1.0, **SCALES}.items():
        try:
            with torch.no_grad():
                output = probe.call(probe.example * scale, None)
        except ValueError:  # a module may reject inputs outside of its domain
            continue
        values = lengths(output)
        least, most = min(least, float(values.min())), max(most, float(values.max()))
        if not bool(torch.isfinite(values).all()):
            problems.append(name)
    tolerance = 1e-6  # rounding of a length that is almost 1
    return make_finding(
        "length_range",
        not problems and least >= 0 and most <= 1 + tolerance,
        "lengths for the example, for zero, tiny and large images",
        f"lengths are in [{least:.4g}, {most:.4g}]" + (f", not finite for {', '.join(problems)}" if problems else ""),
        "the length is read as the probability that an entity is present, and the margin loss needs this range",
        least=least,
        most=most,
    )
