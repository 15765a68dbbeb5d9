"""Equilibrium routing: an iterative routing solved to its fixed point, with an implicit gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps._core.validation import check_range
from torchcaps._core.values import in_transform
from torchcaps.capsules import Capsules, register_pytree
from torchcaps.routing.base import Coefficient, Geometry, Routing, State, as_routing
from torchcaps.routing.inverted_attention import InvertedAttention
from torchcaps.votes import Votes, Wiring

__all__ = ["Equilibrium", "Solution", "count_one_step_gradients"]

LAST = (
    10**6
)  # iteration index at which schedules, such as the inverse temperature of EM, have reached their final value
COMPILED_STEPS = 12  # in a compiled graph and on the meta device, which can't stop by the values
POWER_STEPS = 20  # of the power iteration for the spectral radius
ANDERSON_MEMORY, ANDERSON_RIDGE = 5, 1e-4

Map = Callable[[Tensor], Tensor]  # of flat states [B, n]

_one_step_gradients = 0


class Solution(NamedTuple):
    """Diagnostics of a fixed point, one value per image: ``[B]`` each.

    Attributes:
        steps: number of steps until convergence, or the maximum.
        residual: relative residual ``|F(z) - z| / |F(z)|`` of the last step.
        converged: whether the residual is within the tolerance.
        radius: growth of a gradient by the Jacobian of F after a power iteration: its spectral radius, if the largest
            eigenvalue is real and single; NaN except in a trace.
        point: tensors of the fixed point, ``[B, ...]`` each.

    >>> import torch
    >>> converged, radius = torch.tensor([True, False]), torch.tensor([0.4, 0.9])
    >>> solution = Solution(torch.tensor([12, 30]), torch.tensor([1e-5, 1e-2]), converged, radius)
    >>> int(solution.converged.sum()), int(solution.steps.max())
    (1, 30)
    """

    steps: Tensor
    residual: Tensor
    converged: Tensor
    radius: Tensor
    point: tuple[Tensor, ...] = ()


register_pytree(Solution, "torchcaps.routing.Solution")


@dataclass(frozen=True)
class Equilibrium(Routing):
    """Fixed point of an iterative routing, with the gradient of the fixed point: future work of Tsai 2020.

    With one iteration of the routing as a map ``F(z; v)`` of its state ``z`` and the votes ``v``, the parents are
    ``z* = F(z*; v)``. The solver stores nothing for the gradient: by the implicit function theorem, the gradient ``g``
    of ``z*`` becomes ``u = g + (∂F/∂z)ᵀ u``, solved like the fixed point, which is propagated through a single call of
    F. Memory is that of one iteration, for any number of steps.

    An image whose fixed point, or whose gradient, is not reached within ``max_steps`` gets the gradient of the last
    step only (``u = g``); `count_one_step_gradients` counts these images. Each image stops on its own, so its result
    does not depend on the rest of the batch. In a trace, ``memory`` is a `Solution`: steps, residual and spectral
    radius.

    Args:
        routing: `InvertedAttention`, `KMeans`, `EM` (with its final inverse temperature), `VariationalBayes`,
            `HeinsenEM` or `Heinsen`. `Dynamic` has no fixed point: its logits grow until the couplings are 0 or 1.
        max_steps: largest number of steps, forward and backward each.
        tolerance: relative residual at which the fixed point is reached.
        backward_tolerance: the same for the gradient.
        solver: ``"iteration"`` of F, or ``"anderson"`` acceleration over the last 5 steps.
        damping: step size of the plain iteration, ``z + damping (F(z) - z)``; below 1 for routings whose iteration
            oscillates.

    An exported graph contains all ``max_steps`` steps of the solver; an image whose fixed point is reached keeps it, so
    that the graph computes the same values. The time of the export grows with ``max_steps``.

    Inside transforms of `torch.func` (``vmap``, ``grad``, ``jvp``), which can't stop by value, the gradient is that of
    ``max_steps`` further steps from the fixed point, which tends to the implicit one and takes their memory. An image
    whose fixed point is not reached within ``max_steps`` has other values there, those after twice as many steps.

    Deviation: a layer compiled by `torch.compile` takes 12 plain steps and the gradient of the last one, since it can't
    stop by value.

    >>> import torch, torchcaps
    >>> from torchcaps.routing import KMeans
    >>> parents = torchcaps.route(torch.randn(2, 6, 5, 4), Equilibrium(KMeans()))
    >>> parents.pose.shape
    torch.Size([2, 5, 4])
    """

    paper = "none (future work of Tsai 2020)"
    equation = "none"
    approximate = True

    routing: Routing | str = InvertedAttention()
    max_steps: int = 30
    tolerance: float = 1e-4
    backward_tolerance: float = 1e-6
    solver: Literal["iteration", "anderson"] = "iteration"
    damping: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "routing", as_routing(self.routing))
        super().__post_init__()
        check_range(self, "max_steps", 1)
        check_range(self, "tolerance", 0, strict=True)
        check_range(self, "backward_tolerance", 0, strict=True)
        check_range(self, "damping", 0, 1, strict=True)
        self.inner.check_fixed_point()

    @property
    def inner(self) -> Routing:
        """Routing whose fixed point is solved for."""
        assert isinstance(self.routing, Routing)
        return self.routing

    # Properties of a layer: those of the routing ---------------------------------------------------------------

    @property
    def coupling_axis(self) -> Literal["parents", "children"] | None:  # type: ignore[override]
        """Axis over which couplings sum to 1."""
        return self.inner.coupling_axis

    @property
    def vote_bias(self) -> bool:  # type: ignore[override]
        """Whether votes have a bias."""
        return self.inner.vote_bias

    @property
    def reads_children(self) -> bool:  # type: ignore[override]
        """Whether the routing reads the poses of the children."""
        return self.inner.reads_children

    @property
    def presence(self) -> Literal["length", "normalized", "activation"] | None:  # type: ignore[override]
        """The quantity that indicates the presence of a parent."""
        return self.inner.presence

    @property
    def competition(self) -> str:  # type: ignore[override]
        """The parents that compete for a child."""
        return self.inner.competition

    def check(self, geometry: Geometry) -> None:
        """Raise a ValueError if the routing does not support this geometry."""
        self.inner.check(geometry)

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the tensors of the routing with several iterations, whatever their number."""
        return replace(self.inner, iterations=max(2, self.inner.iterations)).coefficients(geometry)

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise as the routing does."""
        self.inner.init_weight(weight, geometry)

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return the constant that the routing adds to the votes."""
        return self.inner.vote_offset(geometry, wiring, like)

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the limit of the routing."""
        return self.inner.max_vote(dtype)

    # The fixed point -----------------------------------------------------------------------------------------

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Solve for the fixed point."""
        inner = self.inner
        with torch.no_grad():
            quiet = votes.detach()
            first = inner.step(coefficients, quiet, children, inner.init(coefficients, quiet, children), LAST)
            start = inner.pack(first)
            layout = [part.shape[1:] for part in start]
            z = _flatten(start)

            def silent(z: Tensor) -> Tensor:
                after = inner.step(coefficients, quiet, children, inner.unpack(_unflatten(z, layout)), LAST)
                return _flatten(inner.pack(after))

            is_transformed = not torch.compiler.is_compiling() and in_transform()
            if torch.compiler.is_exporting() or is_transformed:
                z, _ = self._solve(silent, z, self.tolerance)
                solution = None
            elif torch.compiler.is_compiling() or z.is_meta:
                for _ in range(COMPILED_STEPS):
                    z = z + self.damping * (silent(z) - z)
                solution = None
            else:
                z, solution = self._solve(silent, z, self.tolerance)
        z = z.detach()
        if solution is not None:
            solution = solution._replace(point=_unflatten(z, layout))
            z = z.clone().requires_grad_(torch.is_grad_enabled())
        for _ in range(self.max_steps - 1 if is_transformed else 0):  # their gradient tends to the implicit one
            after = inner.step(coefficients, votes, children, inner.unpack(_unflatten(z, layout)), LAST)
            z = z + self.damping * (_flatten(inner.pack(after)) - z)
        last = inner.step(coefficients, votes, children, inner.unpack(_unflatten(z, layout)), LAST)
        after = _flatten(inner.pack(last))
        if solution is not None and after.requires_grad:
            converged = solution.converged
            hooked = after.view_as(after)
            hooked.register_hook(lambda g: self._implicit_gradient(g, z, after, converged))
            last = inner.unpack(_unflatten(hooked, layout))._replace(coupling=last.coupling, logits=last.logits)
        return last._replace(memory=solution)

    def _implicit_gradient(self, gradient: Tensor, z: Tensor, after: Tensor, converged: Tensor) -> Tensor:
        """Return ``u = g + (∂F/∂z)ᵀ u``, and ``g`` for images without a solution."""
        global _one_step_gradients

        def transposed(u: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(after, z, u, retain_graph=True)
            return gradient + product

        u, solution = self._solve(transposed, gradient, self.backward_tolerance)
        reached = (solution.converged & converged)[:, None]
        _one_step_gradients += int((~reached).sum())
        return torch.where(reached, u, gradient)

    def _solve(self, function: Map, z: Tensor, tolerance: float) -> tuple[Tensor, Solution]:
        """Return a fixed point of a map of flat states ``[B, n]``, each image with its own stopping criterion."""
        images = z.shape[0]  # symbolic in an exported graph
        steps = torch.zeros(images, dtype=torch.int64, device=z.device)
        residual = z.new_full((images,), torch.inf)
        open_ = torch.ones(images, dtype=torch.bool, device=z.device)
        history: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.max_steps):
            after = function(z)
            distance = torch.linalg.vector_norm(after - z, dim=1)
            size = torch.linalg.vector_norm(after, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
            residual = torch.where(open_, distance / size, residual)
            steps = steps + open_  # not in place: inside vmap only one of them may be batched
            if self.solver == "anderson":
                history = [*history, (z, after)][-ANDERSON_MEMORY:]
                proposal = _anderson(history)
            else:
                proposal = z + self.damping * (after - z)
            z = torch.where(open_[:, None], proposal, z)
            open_ = open_ & ~(residual <= tolerance)
            # A graph has all steps: those after the last image has stopped change nothing.
            if not torch.compiler.is_exporting() and not in_transform() and not bool(open_.any()):
                break
        return z, Solution(steps, residual, residual <= tolerance, torch.full_like(residual, torch.nan))

    def annotate(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State) -> State:
        """Return the state of a trace, with the spectral radius of the Jacobian at the fixed point."""
        if state.memory is None:
            return state
        solution, inner, quiet = state.memory, self.inner, votes.detach()
        layout = [part.shape[1:] for part in solution.point]
        z = _flatten(solution.point).requires_grad_()
        with torch.enable_grad():
            after = inner.step(coefficients, quiet, children, inner.unpack(_unflatten(z, layout)), LAST)
            flat = _flatten(inner.pack(after))
        u = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device).view_as(z).cos()
        radius = torch.zeros_like(solution.radius)
        for _ in range(POWER_STEPS):
            u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
            (u,) = torch.autograd.grad(flat, z, u, retain_graph=True)
            radius = torch.linalg.vector_norm(u, dim=1)
        return state._replace(memory=solution._replace(radius=radius))


def count_one_step_gradients(reset: bool = False) -> int:
    """Return the number of images that got the gradient of the last step only, since the start or the last reset.

    >>> count_one_step_gradients(reset=True) >= 0
    True
    """
    global _one_step_gradients
    count = _one_step_gradients
    if reset:
        _one_step_gradients = 0
    return count


def _flatten(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the tensors of a state as one row per image, ``[B, n]``."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _unflatten(z: Tensor, layout: list[torch.Size]) -> tuple[Tensor, ...]:
    """Return the tensors of a state from rows ``[B, n]``."""
    parts = z.split([size.numel() for size in layout], dim=1)
    return tuple(part.unflatten(1, size) for part, size in zip(parts, layout, strict=True))


def _anderson(history: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the combination of the last images of F whose residuals cancel best: Anderson acceleration, mixing 1."""
    after = torch.stack([pair[1] for pair in history], dim=1)  # [B, m, n]
    if len(history) == 1:
        return after[:, 0]
    residual = after - torch.stack([pair[0] for pair in history], dim=1)
    residual = residual.to(torch.promote_types(residual.dtype, torch.float32))  # half precision has no solver
    gram = torch.matmul(residual, residual.transpose(1, 2))  # [B, m, m]
    scale = gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(gram.dtype).tiny)[:, None, None]
    ridge = ANDERSON_RIDGE * torch.eye(len(history), dtype=gram.dtype, device=gram.device)
    weight, _ = torch.linalg.solve_ex(gram / scale + ridge, torch.ones_like(gram[:, :, :1]))  # [B, m, 1]
    weight = (weight / weight.sum(1, keepdim=True)).to(after.dtype)
    # Equal residuals can make the matrix singular: such images take a step without acceleration.
    is_solved = torch.isfinite(weight).all(1)  # [B, 1]
    return torch.where(is_solved, (weight * after).sum(1), after[:, -1])
