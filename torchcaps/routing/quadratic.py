"""Routing as a regularised quadratic program, solved a step at a time beside training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps._core.validation import check_range
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.functional import squash
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
        reduction: ``"sum"`` over the batch is the equation. ``"mean"`` of it keeps rate and strength independent of
            the batch's size; a strength then weighs as much as ``p`` times itself in the equation, with ``p`` images.
            Adam always takes the mean.
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
        check_range(self, "rate", 0, 1e9, strict=True)
        check_range(self, "strength", 0, 1e9)
        check_range(self, "limit", 0, strict=True)
        check_range(self, "initial", -1e9, 1e9)
        if self.initial == 0:
            raise ValueError("Quadratic: initial must not be 0: all votes and all gradients would be 0 for ever")

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the coefficients and, for Adam, its moments: buffers, so that they are saved and never descended."""
        owned = {"coefficient": Coefficient(("I", "J"), self.initial, learned=False)}
        if self.method == "adam":
            owned["first_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            owned["second_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            owned["n_steps"] = Coefficient((), 0, learned=False, dtype=torch.int64)
        return owned

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum with the coefficients and squash."""
        coupling = p["coefficient"].expand(votes.shape[:-1])
        return State(pose=squash(votes.sum(coupling)), coupling=coupling)

    # The other half of training ----------------------------------------------------------------------------

    @staticmethod
    def ascend(
        module: nn.Module,
        batch: Any,
        labels: Tensor,
        n_images: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Take one ascent step on the coefficients of every `Quadratic` layer: Algorithm 1, line "update b".

        No weight and no other state of the module changes, and no weight gets a gradient. Layers below the class
        layer get the slope of the same F, through everything in between.

        Args:
            module: a capsule layer with this routing, or a model with one or more of them; the last that the
                model calls is the class layer that F is made of.
            batch: what ``module`` is called with. Random layers, such as dropout, draw anew.
            labels: ``[B]`` class numbers, ``[B, K]`` those of ``K`` objects in each image, or ``[B, J]`` with ones for
                every label of an image.
            n_images: how many images the mean is over, where this is one process of several that share a batch; by
                default those of ``labels``.
            reduce: adds a tensor up over these processes, so that all of them take the same step.

        Returns:
            F before the step, without penalties: the batch's mean or sum, as ``reduction`` says.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a capsule layer or a model, got {type(module).__name__}")
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Quadratic.ascend can't run inside torch.inference_mode(): it needs gradients")
        if isinstance(module, nn.DataParallel):
            module = module.module
        modules: list[Any] = list(module.modules())
        layers = [layer for layer in modules if isinstance(getattr(layer, "routing", None), Quadratic)]
        if not layers:
            raise ValueError(f"module must have a capsule layer with Quadratic routing, got {type(module).__name__}")
        top: Any
        if layers[0] is module:
            top, children, hidden = module, as_capsules(batch), {}
        else:
            top, children, hidden = _run(module, layers, batch)
        routing: Quadratic = top.routing
        with torch.set_grad_enabled(bool(hidden)):
            votes = top.votes(children)
            value, query = routing._objective(top, votes, labels, n_images)
            slopes = torch.autograd.grad(value, list(hidden.values()), allow_unused=True) if hidden else ()
            if any(slope is None for slope in slopes):
                raise ValueError("every Quadratic layer of module must lead to the last one called, and one does not")
        with torch.no_grad():
            # dF/db_ij = Σ_k <dF/dv_kj, v_kij>: one more reduction of the votes.
            slope = votes.detach().dot(query.detach()).sum_to_size(top.coefficients["coefficient"].shape)
            if reduce is not None:
                value, slope, slopes = reduce(value), reduce(slope), [reduce(along) for along in slopes]
            pairs = [*zip(hidden, slopes, strict=True), (top, slope)]
            moved = [(layer, layer.routing._moved(layer, along)) for layer, along in pairs]
            for layer, tensors in moved:  # all of them, once none has run away
                for name, tensor in tensors.items():
                    layer.coefficients[name].copy_(tensor)
        return value.detach()

    def _objective(self, top: Any, votes: Votes, labels: Tensor, n_images: int | None) -> tuple[Tensor, Tensor]:
        """Return F without penalty and its gradient ``dF/dv``, ``[B, *L, J, D]``."""
        if any(size != 1 for size in votes.wiring.sites):
            raise ValueError(f"the class layer must have one place, got a grid of {list(votes.wiring.sites)}")
        n_classes = votes.shape[-2]
        if isinstance(labels, Tensor) and labels.dim() == 2 and labels.shape[1] != n_classes:
            labels = split_labels(labels, n_classes, labels.shape[1])[1]
        hot = as_multi_hot(labels, n_classes).to(top.coefficients["coefficient"])
        if len(hot) != votes.shape[0]:
            raise ValueError(f"labels must be one for each of the {votes.shape[0]} images, got {len(hot)}")
        sign = (2 * hot - 1).view(-1, *votes.wiring.sites, n_classes, 1)
        if self.reduction == "mean" or self.method == "adam":
            sign = sign / (len(hot) if n_images is None else n_images)
        total = votes.sum(top.coefficients["coefficient"])  # v_j, before the squash
        square = (total * total).sum(-1, keepdim=True)
        if self.objective == "sum":
            return (sign * square).sum(), 2 * sign * total
        # |squash(v)|² = (n/(1+n))² with n = |v|², so its slope by n is 2n/(1+n)³.
        value = (sign * (square / (1 + square)) ** 2).sum()
        return value, 2 * sign * (2 * square / (1 + square) ** 3) * total

    def _moved(self, layer: Any, slope: Tensor) -> dict[str, Tensor]:
        """Return the coefficients (and Adam's moments) after a step along ``slope``, or raise if they ran away."""
        # At least float32: a step is small beside what it is added to.
        dtype = torch.promote_types(slope.dtype, torch.float32)
        b, slope = layer.coefficients["coefficient"].to(dtype), slope.to(dtype)
        if self.method == "paper":
            rate = 0.01 if self.rate is None else self.rate
            strength = 0.001 if self.strength is None else self.strength
            pull = b if self.penalty == "l2" else b.sign()
            moved = {"coefficient": b + 2 * rate * (slope / 2 - strength * pull)}
        else:
            moved = self._adam(layer.p(), b, slope)
        largest = float(moved["coefficient"].abs().max())
        if not largest <= self.limit:
            raise RoutingDivergence(
                f"the coefficients of Quadratic routing ran away: the next step has |b| = {largest:.3g}, over "
                f"the limit of {self.limit:g}. Nothing was changed; lower rate or raise strength"
            )
        return moved

    def _adam(self, p: Mapping[str, Tensor], b: Tensor, slope: Tensor) -> dict[str, Tensor]:
        """Take a step of Adam (betas 0.9 and 0.999, epsilon 1e-8) up the objective."""
        rate = 0.0002 if self.rate is None else self.rate
        strength = 0.00001 if self.strength is None else self.strength
        pull = 2 * b if self.penalty == "l2" else b.sign()
        slope = slope - strength * pull / b.shape[0]
        n_steps = int(p["n_steps"]) + 1
        first = 0.9 * p["first_moment"].to(b) + 0.1 * slope
        second = 0.999 * p["second_moment"].to(b) + 0.001 * slope**2
        step = rate * (first / (1 - 0.9**n_steps)) / ((second / (1 - 0.999**n_steps)).sqrt() + 1e-8)
        count = torch.tensor(n_steps)
        return {"coefficient": b + step, "first_moment": first, "second_moment": second, "n_steps": count}


def _run(module: nn.Module, layers: list[Any], batch: Any) -> tuple[Any, Capsules, dict[Any, Tensor]]:
    """Run a module on stand-ins for its buffers, so that none of them changes.

    Returns:
        the `Quadratic` layer that was called last, what it was given, and for each of the others the stand-in of its
        coefficients, which the result depends on.
    """
    called: dict[Any, Capsules] = {}

    def note(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer in called:
            raise ValueError("module must call each of its Quadratic layers once, got one that it calls twice")
        called[layer] = as_capsules(inputs[0] if inputs else named["capsules"])

    own = {id(layer.coefficients["coefficient"]): layer for layer in layers}
    stand_ins, hidden = {}, {}
    for name, buffer in module.named_buffers():
        stand_ins[name] = buffer.detach().clone()
        if id(buffer) in own:
            hidden[own[id(buffer)]] = stand_ins[name]
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.set_grad_enabled(len(layers) > 1):
            for stand_in in hidden.values():
                stand_in.requires_grad_(len(layers) > 1)
            torch.func.functional_call(module, stand_ins, (batch,))
    finally:
        for handle in handles:
            handle.remove()
    if len(called) < len(layers):
        raise ValueError(f"module must call all of its {len(layers)} Quadratic layers, got {len(called)} called")
    top = list(called)[-1]
    del hidden[top]
    return top, called[top], hidden
