"""Routing as a regularised quadratic program, solved a step at a time beside training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.activations import squash
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.labels import as_multi_hot
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.votes import Votes

__all__ = ["Quadratic", "RoutingDivergence"]


class RoutingDivergence(RuntimeError):
    """The quadratic program ran away. The layer keeps the coefficients from before the step."""


@dataclass(frozen=True)
class Quadratic(Routing):
    """Routing towards discriminative power: Yang, Li, Yu 2021.

    The forward pass has no loop and no softmax, and takes the coefficients as they are (the paper calls the
    sum ``v`` and the capsule ``s``, the other way round than Sabour 2017)::

        v_j = Σ_i b_ij v_ij,   s_j = squash(v_j)

    ``b`` is one tensor for all images, of any sign. Gradient descent must not move it, so it is a buffer of the
    layer, not a parameter. In turns with descent on everything else, `ascend` takes a step up the quadratic
    program with the labels of the batch (Algorithm 1)::

        F_j(b_j) = Σ_k delta_jk b_j' U_kj U_kj' b_j - lambda R(b_j)      eq. 12, 14

    with ``delta`` +1 for a label of image ``k`` and -1 otherwise, ``U_kj`` the votes for class ``j``. Since
    ``U_kj' b_j`` is ``v_j`` of image ``k``, the step costs two reductions of the votes; no matrix of children by
    children is ever formed.

    Args:
        penalty: ``"l2"``, R = |b|² (eq. 13), or ``"l1"``, R = |b|_1 (eq. 15, with ``sign(0) = 0``).
        method: ``"paper"``: ``b += 2 gamma (Σ_k delta U U' b - lambda b)``, or ``lambda sign(b)`` for L1, the
            factor 2 before it as printed. ``"adam"``: Adam on the same objective over the mean of the batch,
            with the penalty ``lambda mean_i b²``, as the code that implements the paper does.
        rate: gamma, or Adam's learning rate; by default 0.01 or 0.0002. The paper does not state it.
        strength: lambda; by default 0.001 or, for Adam, 0.00001.
        reduction: ``"mean"`` over the batch keeps the rate independent of its size; ``"sum"`` is the equation.
        objective: ``"sum"``: F is made of ``|v|²``, as printed. ``"capsule"``: of ``|squash(v)|²``, as one
            branch of that code has it.
        initial: first value of every coefficient; zero would never move.
        limit: the largest ``|b|`` that counts as sane. F is not bounded, so a step can run away: `ascend`
            then raises `RoutingDivergence` and changes nothing.

    Deviation: the paper has it in the class layer only. A convolution keeps one coefficient for each slot and
    parent type, shared by all places; hidden layers get theirs by the chain rule, through the same F.

    """

    paper = "Yang 2021"
    equation = "eq. 12 to 15, Algorithm 1"
    couples = None

    penalty: Literal["l2", "l1"] = "l2"
    method: Literal["paper", "adam"] = "paper"
    rate: float | None = None
    strength: float | None = None
    reduction: Literal["mean", "sum"] = "mean"
    objective: Literal["sum", "capsule"] = "sum"
    initial: float = 1.0
    limit: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial == 0:
            raise ValueError("Quadratic: initial must not be 0: all votes and all gradients would be 0 for ever")

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the coefficients and, for Adam, its moments: buffers, so that they are saved and never descended."""
        owned = {"coefficient": Coefficient(("I", "J"), self.initial, learned=False)}
        if self.method == "adam":
            owned["first_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            owned["second_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            owned["n_steps"] = Coefficient((), 0.0, learned=False)
        return owned

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum with the coefficients and squash."""
        coupling = p["coefficient"].expand(votes.shape[:-1])
        return State(pose=squash(votes.sum(coupling)), coupling=coupling)

    # The other half of training ----------------------------------------------------------------------------

    @staticmethod
    def ascend(module: nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Take one ascent step on the coefficients of every `Quadratic` layer: Algorithm 1, line "update b".

        Nothing but those coefficients changes: weights are read only, and get no gradient.

        Args:
            module: a capsule layer with this routing, or a model with one or more of them; the last of
                ``module.modules()`` is the class layer that F is made of.
            batch: what ``module`` is called with.
            labels: ``[B]`` class numbers, or ``[B, J]`` with ones for every label of an image.

        Returns:
            F over the batch before the step, penalties left out.

        """
        modules: list[Any] = list(module.modules())
        layers = [layer for layer in modules if isinstance(getattr(layer, "routing", None), Quadratic)]
        if not layers:
            raise ValueError(f"module must have a capsule layer with Quadratic routing, got {type(module).__name__}")
        *hidden, top = layers
        routing: Quadratic = top.routing
        own = [layer.coefficients["coefficient"] for layer in hidden]
        try:
            for coefficient in own:
                coefficient.requires_grad_(True)
            with torch.set_grad_enabled(bool(own)):
                children = as_capsules(batch) if top is module else _input_of(top, module, batch)
                votes = top.votes(children)
                value, query = routing._objective(top, votes, labels)
                slopes = list(torch.autograd.grad(value, own)) if own else []
            with torch.no_grad():
                # dF/db_ij = Σ_k <dF/dv_kj, v_kij>: one more reduction of the votes.
                slope = votes.detach().dot(query.detach())
                slopes.append(slope.sum_to_size(top.coefficients["coefficient"].shape))
        finally:
            for coefficient in own:
                coefficient.requires_grad_(False)
        moved = [layer.routing._moved(layer, slope) for layer, slope in zip(layers, slopes, strict=True)]
        for layer, tensors in zip(layers, moved, strict=True):
            for name, tensor in tensors.items():
                layer.coefficients[name].copy_(tensor)
        return value.detach()

    def _objective(self, top: Any, votes: Votes, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return F without penalty and its gradient ``dF/dv``, ``[B, *L, J, D]``."""
        if any(size != 1 for size in votes.wiring.sites):
            raise ValueError(f"the class layer must have one place, got a grid of {list(votes.wiring.sites)}")
        n_classes = votes.shape[-2]
        hot = as_multi_hot(labels, n_classes).to(top.coefficients["coefficient"])
        if len(hot) != votes.shape[0]:
            raise ValueError(f"labels must be one for each of the {votes.shape[0]} images, got {len(hot)}")
        sign = (2 * hot - 1).view(-1, *votes.wiring.sites, n_classes, 1)
        if self.reduction == "mean" or self.method == "adam":
            sign = sign / len(hot)
        total = votes.sum(top.coefficients["coefficient"])  # v_j, before the squash
        square = (total * total).sum(-1, keepdim=True)
        if self.objective == "sum":
            return (sign * square).sum(), 2 * sign * total
        # |squash(v)|² = (n/(1+n))² with n = |v|², so its slope by n is 2n/(1+n)³.
        value = (sign * (square / (1 + square)) ** 2).sum()
        return value, 2 * sign * (2 * square / (1 + square) ** 3) * total

    def _moved(self, layer: Any, slope: Tensor) -> dict[str, Tensor]:
        """Return the coefficients (and Adam's moments) after a step along ``slope``, or raise if they ran away."""
        b = layer.coefficients["coefficient"].detach()
        if self.method == "paper":
            rate = 0.01 if self.rate is None else self.rate
            strength = 0.001 if self.strength is None else self.strength
            pull = b if self.penalty == "l2" else b.sign()
            moved = {"coefficient": b + 2 * rate * (slope / 2 - strength * pull)}
        else:
            moved = self._adam(layer, b, slope)
        largest = moved["coefficient"].abs().max()
        if not largest <= self.limit:
            raise RoutingDivergence(
                f"the coefficients of Quadratic routing ran away: the next step has |b| = {float(largest):.3g}, over "
                f"the limit of {self.limit:g}. Nothing was changed; lower rate or raise strength"
            )
        return moved

    def _adam(self, layer: Any, b: Tensor, slope: Tensor) -> dict[str, Tensor]:
        """Take a step of Adam (betas 0.9 and 0.999, epsilon 1e-8) up the objective."""
        rate = 0.0002 if self.rate is None else self.rate
        strength = 0.00001 if self.strength is None else self.strength
        pull = 2 * b if self.penalty == "l2" else b.sign()
        slope = slope - strength * pull / b.shape[0]
        n_steps = layer.coefficients["n_steps"] + 1
        first = 0.9 * layer.coefficients["first_moment"] + 0.1 * slope
        second = 0.999 * layer.coefficients["second_moment"] + 0.001 * slope**2
        unbiased = first / (1 - 0.9**n_steps), second / (1 - 0.999**n_steps)
        step = rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        return {"coefficient": b + step, "first_moment": first, "second_moment": second, "n_steps": n_steps}


def _input_of(layer: nn.Module, module: nn.Module, batch: Any) -> Capsules:
    """Run a module and return what it gave to one of its layers."""
    seen: list[Capsules] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(as_capsules(inputs[0])))
    try:
        module(batch)
    finally:
        handle.remove()
    if not seen:
        raise ValueError("the last Quadratic layer of the module was not called when the module was")
    return seen[-1]
