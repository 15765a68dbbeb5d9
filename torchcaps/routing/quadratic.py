"""Routing as a regularised quadratic program, solved by one ascent step per training step: Yang 2021."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

__all__ = ["Quadratic", "RecordedChildren", "RoutingDivergence"]


class RoutingDivergence(RuntimeError):
    """The coefficients of the quadratic program exceeded their limit; the layer keeps the values before the step.

    >>> try:
    ...     raise RoutingDivergence("the coefficients exceeded 100")
    ... except RuntimeError as error:
    ...     print(error)
    the coefficients exceeded 100
    """


@dataclass(frozen=True)
class Quadratic(Routing):
    """Routing towards discriminative power: Yang, Li, Yu 2021.

    The forward pass has no loop and no softmax and uses the coefficients as they are (the paper calls the sum ``v``
    and the capsule ``s``, opposite to Sabour 2017)::

        v_j = Σ_i b_ij v_ij,   s_j = squash(v_j)

    ``b`` is one tensor for all images, of any sign. Gradient descent must not change it, so it is a buffer of the
    layer, not a parameter. Alternating with descent on all other weights, `ascend` takes a gradient ascent step on the
    quadratic program with the labels of the batch (Algorithm 1)::

        F_j(b_j) = Σ_k delta_jk b_j' U_kj U_kj' b_j - lambda R(b_j)      eq. 12, 14

    with ``delta`` +1 for a label of image ``k`` and -1 otherwise, ``U_kj`` the votes for class ``j``. Since
    ``U_kj' b_j`` is ``v_j`` of image ``k``, the step costs two reductions of the votes; no matrix of children by
    children is ever formed.

    Args:
        penalty: ``"l2"``, R = |b|² (eq. 13), or ``"l1"``, R = |b|_1 (eq. 15, with ``sign(0) = 0``).
        method: ``"paper"``: ``b += 2 gamma (Σ_k delta U U' b - lambda b)``, or ``lambda sign(b)`` for L1, with the
            factor 2 as printed. ``"adam"``: Adam on the same objective averaged over the batch, with the penalty
            ``lambda mean_i b²``, as in the code that implements the paper.
        lr: learning rate of the ascent, gamma; default 0.01, or 0.0002 for Adam. The paper does not state it. In
            training it follows the learning-rate schedule of the weights (`torchcaps.models.Recipe.ascent_lr`).
        penalty_weight: lambda of the equation; default 0.001, the paper's example, or 0.00001 for Adam.
        reduction: ``"sum"`` over the batch is the paper's equation. ``"mean"`` divides all of F, the penalty included,
            by the number of images ``p``: lambda keeps the scale of the equation, and lr is ``p`` times the gamma of
            eq. 13. Adam always uses the mean, of the votes' part only, as in that code.
        objective: ``"sum"``: F is computed from ``|v|²``, as printed. ``"capsule"``: from ``|squash(v)|²``, as in one
            branch of that code.
        initial: initial value of every coefficient; must not be zero, which is a stationary point.
        limit: largest accepted ``|b|``. F is unbounded, so an ascent can diverge: `ascend` then raises
            `RoutingDivergence` and changes nothing.

    Deviation: the paper uses it in the class layer only. A convolution has one coefficient per slot and parent type,
    shared by all positions; hidden layers are updated by the chain rule, through the same F.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=Quadratic())
    >>> layer(torch.randn(2, 32, 8)).pose.shape, [name for name, _ in layer.named_buffers()]
    (torch.Size([2, 10, 16]), ['coefficients.coefficient'])
    """

    paper = "Yang 2021"
    equation = "eq. 12 to 15, Algorithm 1"
    coupling_axis = None

    penalty: Literal["l2", "l1"] = "l2"
    method: Literal["paper", "adam"] = "paper"
    lr: float | None = None
    penalty_weight: float | None = None
    reduction: Literal["mean", "sum"] = "mean"
    objective: Literal["sum", "capsule"] = "sum"
    initial: float = 1.0
    limit: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lr", 0, 1e9, strict=True)
        check_range(self, "penalty_weight", 0, 1e9)
        check_range(self, "limit", 0, strict=True)
        check_range(self, "initial", -1e9, 1e9)
        if self.initial == 0:
            raise ValueError("Quadratic: initial must not be 0: all sums and gradients would stay 0")

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the coefficients and, for Adam, its moments: buffers, saved but not changed by gradient descent."""
        coefficients = {"coefficient": Coefficient(("I", "J"), self.initial, learned=False)}
        if self.method == "adam":
            coefficients["first_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            coefficients["second_moment"] = Coefficient(("I", "J"), 0.0, learned=False)
            coefficients["n_steps"] = Coefficient((), 0, learned=False, dtype=torch.int64)
        return coefficients

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum the votes with the coefficients and squash."""
        coupling = coefficients["coefficient"].expand(votes.shape[:-1])
        return State(pose=squash(votes.sum(coupling)), coupling=coupling)

    # The ascent step of training ----------------------------------------------------------------------------

    @staticmethod
    def ascend(
        module: nn.Module,
        batch: Any,
        labels: Tensor,
        n_images: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        lr_factor: float = 1.0,
    ) -> Tensor:
        """Take one ascent step on the coefficients of every `Quadratic` layer: Algorithm 1, line "update b".

        No weight and no other state of the module changes, and no weight receives a gradient. Layers below the class
        layer use the gradient of the same F, backpropagated through the layers in between.

        Args:
            module: a capsule layer with this routing, or a model with one or more of them; the one that the model
                calls last is the class layer, from which F is computed.
            batch: the input of ``module``; for a layer its children, for example those that `record_children` has
                kept from the forward pass of the descent. Random layers, such as dropout, draw new samples.
            labels: class indices ``[B]``, those of ``K`` objects per image ``[B, K]``, or multi-hot rows ``[B, J]``.
            n_images: number of images of the global batch, if several processes share it; default: the number of
                ``labels``.
            reduce: function that sums a tensor over these processes, so that all of them take the same step.
            lr_factor: factor of the learning rate of the ascent: that of the learning-rate schedule.

        Returns:
            F before the step, without penalties: mean or sum over the batch, according to ``reduction``.
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
        n_images = len(labels) if n_images is None else n_images
        with torch.set_grad_enabled(bool(hidden)):
            votes = top.votes(children)
            value, query = routing._objective(top, votes, labels, n_images)
            gradients = torch.autograd.grad(value, list(hidden.values()), allow_unused=True) if hidden else ()
            if any(gradient is None for gradient in gradients):
                raise ValueError("every Quadratic layer of module must feed the last one called, and one does not")
        with torch.no_grad():
            # dF/db_ij = Σ_k <dF/dv_kj, v_kij>: one more reduction of the votes.
            top_gradient = votes.detach().dot(query.detach()).sum_to_size(top.coefficients["coefficient"].shape)
            if reduce is not None:
                value, top_gradient = reduce(value), reduce(top_gradient)
                gradients = [reduce(gradient) for gradient in gradients]
            pairs = [*zip(hidden, gradients, strict=True), (top, top_gradient)]
            updates = [
                (layer, layer.routing._ascent_step(layer, gradient, n_images, lr_factor)) for layer, gradient in pairs
            ]
            for layer, tensors in updates:  # only after the updates of all layers were checked
                for name, tensor in tensors.items():
                    layer.coefficients[name].copy_(tensor)
        return value.detach()

    @staticmethod
    @contextmanager
    def record_children(module: nn.Module) -> "Iterator[RecordedChildren]":
        """Context manager: keep the children of the model's `Quadratic` layer in its forward passes.

        The ascent needs only them and the transforms, so `RecordedChildren.ascend` takes its step without another
        forward pass of the layers below. Algorithm 1 updates the coefficients after the weights: recorded children are
        those of the weights before the descent step, while the transforms are those after it.

        Args:
            module: a capsule layer with this routing, or a model with one of them.

        >>> from torchcaps.nn import DenseCapsules
        >>> layer = DenseCapsules(6, 4, 3, 4, routing=Quadratic())
        >>> with Quadratic.record_children(layer) as children:
        ...     _ = layer(torch.randn(2, 6, 4))
        >>> children.ascend(torch.tensor([0, 2])).shape
        torch.Size([])
        """
        layers = [layer for layer in module.modules() if isinstance(getattr(layer, "routing", None), Quadratic)]
        if len(layers) != 1:
            raise ValueError(
                f"children can be recorded for a module with one Quadratic layer, got {len(layers)} in "
                f"{type(module).__name__}: use Quadratic.ascend with the batch"
            )
        recorded = RecordedChildren(layers[0])
        handle = layers[0].register_forward_pre_hook(recorded.append, with_kwargs=True)
        try:
            yield recorded
        finally:
            handle.remove()

    def _objective(self, top: Any, votes: Votes, labels: Tensor, n_images: int) -> tuple[Tensor, Tensor]:
        """Return F without penalty and its gradient ``dF/dv``, ``[B, *L, J, D]``."""
        if any(size != 1 for size in votes.wiring.sites):
            raise ValueError(f"the class layer must have one position, got a grid of {list(votes.wiring.sites)}")
        n_classes = votes.shape[-2]
        if isinstance(labels, Tensor) and labels.dim() == 2 and labels.shape[1] != n_classes:
            labels = split_labels(labels, n_classes, labels.shape[1])[1]
        hot = as_multi_hot(labels, n_classes).to(top.coefficients["coefficient"])
        if len(hot) != votes.shape[0]:
            raise ValueError(f"labels must have one entry for each of the {votes.shape[0]} images, got {len(hot)}")
        sign = (2 * hot - 1).view(-1, *votes.wiring.sites, n_classes, 1)
        if self.reduction == "mean" or self.method == "adam":
            sign = sign / n_images
        total = votes.sum(top.coefficients["coefficient"])  # v_j, before the squash
        square = (total * total).sum(-1, keepdim=True)
        if self.objective == "sum":
            return (sign * square).sum(), 2 * sign * total
        # |squash(v)|² = (n/(1+n))² with n = |v|², so its derivative by n is 2n/(1+n)³.
        value = (sign * (square / (1 + square)) ** 2).sum()
        return value, 2 * sign * (2 * square / (1 + square) ** 3) * total

    def _ascent_step(self, layer: Any, gradient: Tensor, n_images: int, lr_factor: float) -> dict[str, Tensor]:
        """Return the coefficients (and Adam's moments) after an ascent step; raise if they exceed the limit."""
        # At least float32, since a step is small compared with the coefficient.
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        b, gradient = layer.coefficients["coefficient"].to(dtype), gradient.to(dtype)
        if self.method == "paper":
            lr = lr_factor * (0.01 if self.lr is None else self.lr)
            weight = 0.001 if self.penalty_weight is None else self.penalty_weight
            if self.reduction == "mean":
                weight /= n_images
            penalty_gradient = b if self.penalty == "l2" else b.sign()
            updated = {"coefficient": b + 2 * lr * (gradient / 2 - weight * penalty_gradient)}
        else:
            updated = self._adam_step(layer.coefficients.named(), b, gradient, lr_factor)
        largest = float(updated["coefficient"].abs().max())
        if not largest <= self.limit:
            raise RoutingDivergence(
                f"the coefficients of Quadratic routing diverged: the next step has |b| = {largest:.3g}, above "
                f"limit={self.limit:g}. Nothing was changed; decrease lr or increase penalty_weight"
            )
        return updated

    def _adam_step(
        self, coefficients: Mapping[str, Tensor], b: Tensor, gradient: Tensor, lr_factor: float
    ) -> dict[str, Tensor]:
        """Return the coefficients and moments after an ascent step of Adam (betas 0.9 and 0.999, eps 1e-8)."""
        lr = lr_factor * (0.0002 if self.lr is None else self.lr)
        weight = 0.00001 if self.penalty_weight is None else self.penalty_weight
        penalty_gradient = 2 * b if self.penalty == "l2" else b.sign()
        gradient = gradient - weight * penalty_gradient / b.shape[0]
        n_steps = int(coefficients["n_steps"]) + 1
        first = 0.9 * coefficients["first_moment"].to(b) + 0.1 * gradient
        second = 0.999 * coefficients["second_moment"].to(b) + 0.001 * gradient**2
        step = lr * (first / (1 - 0.9**n_steps)) / ((second / (1 - 0.999**n_steps)).sqrt() + 1e-8)
        count = torch.tensor(n_steps)
        return {"coefficient": b + step, "first_moment": first, "second_moment": second, "n_steps": count}


class RecordedChildren:
    """Children of a `Quadratic` layer, of one or several micro-batches: see `Quadratic.record_children`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._micro_batches: list[Capsules] = []

    def append(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the input of a forward pass, without its graph."""
        children = as_capsules(inputs[0] if inputs else named["capsules"])
        dtype = self.layer.coefficients["coefficient"].dtype  # autocast may have computed them in another
        activation = None if children.activation is None else children.activation.detach().to(dtype)
        self._micro_batches.append(Capsules(children.pose.detach().to(dtype), activation))

    def ascend(self, labels: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Take one ascent step with the recorded children; other arguments and the result as in `Quadratic.ascend`."""
        if not self._micro_batches:
            raise RuntimeError("no children recorded: run a forward pass inside of Quadratic.record_children first")
        poses, activations = ([getattr(c, name) for c in self._micro_batches] for name in ("pose", "activation"))
        children = Capsules(torch.cat(poses), None if activations[0] is None else torch.cat(activations))
        return Quadratic.ascend(self.layer, children, labels, *arguments, **named)


def _run(module: nn.Module, layers: list[Any], batch: Any) -> tuple[Any, Capsules, dict[Any, Tensor]]:
    """Run a module with copies of its buffers, so that none of them changes.

    Returns:
        the `Quadratic` layer that was called last, its input, and for each of the other layers the copy of its
        coefficients, with respect to which the result can be differentiated.
    """
    inputs_of: dict[Any, Capsules] = {}

    def record_input(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer in inputs_of:
            raise ValueError("module must call each of its Quadratic layers once, got one that it calls twice")
        inputs_of[layer] = as_capsules(inputs[0] if inputs else named["capsules"])

    layer_of_buffer = {id(layer.coefficients["coefficient"]): layer for layer in layers}
    copies, hidden = {}, {}
    for name, buffer in module.named_buffers():
        copies[name] = buffer.detach().clone()
        if id(buffer) in layer_of_buffer:
            hidden[layer_of_buffer[id(buffer)]] = copies[name]
    handles = [layer.register_forward_pre_hook(record_input, with_kwargs=True) for layer in layers]
    try:
        with torch.set_grad_enabled(len(layers) > 1):
            for copy in hidden.values():
                copy.requires_grad_(len(layers) > 1)
            torch.func.functional_call(module, copies, (batch,))
    finally:
        for handle in handles:
            handle.remove()
    if len(inputs_of) < len(layers):
        raise ValueError(f"module must call all of its {len(layers)} Quadratic layers, got {len(inputs_of)} called")
    top = list(inputs_of)[-1]
    del hidden[top]
    return top, inputs_of[top], hidden
