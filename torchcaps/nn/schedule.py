"""In which order a stack of capsule layers iterates."""

from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_capsules, without_autocast
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing.base import State, Trace

__all__ = ["CapsuleStack"]


class CapsuleStack(nn.Module):
    """Capsule layers on top of each other, with a schedule for their iterations: Tsai 2020, Procedure 2.

    ``"concurrent"``: the first pass goes bottom up, each layer on the fresh parents of the one below. In every
    further iteration all layers step at once, each on the capsules that the one below had *before* it. The
    poses of a layer so change under the layer above while that is still routing.

    ``"sequential"``: a layer finishes its iterations before the next begins, as everywhere else (ablation B).

    With one iteration both are the same; the first layer is the same for any number.

    Args:
        layers: `DenseCapsules` and `ConvCapsules`, the lowest first, all with the same number of iterations
            where the schedule is concurrent.
        schedule: see above.

    Shapes:
        the lowest layer's input ``->`` the highest layer's output

    """

    def __init__(
        self, layers: Iterable[CapsuleLayer], schedule: Literal["concurrent", "sequential"] = "concurrent"
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.schedule = schedule
        if schedule not in ("concurrent", "sequential"):
            raise ValueError(f"schedule must be 'concurrent' or 'sequential', got {schedule!r}")
        if not self.layers:
            raise ValueError("layers must hold one capsule layer or more, got none")
        for layer in self.layers:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(f"layers must be DenseCapsules or ConvCapsules, got {type(layer).__name__}")
        counts = [layer.routing.iterations for layer in self.layers]  # type: ignore[union-attr]
        if schedule == "concurrent" and len(set(counts)) > 1:
            raise ValueError(f"layers must have the same number of iterations to step concurrently, got {counts}")

    def forward(
        self, capsules: Capsules | Tensor, trace: bool = False
    ) -> Capsules | tuple[Capsules, tuple[Trace, ...]]:
        """Route through all layers; with ``trace`` return the states of every layer and iteration as well."""
        first: CapsuleLayer = self.layers[0]  # type: ignore[assignment]
        if self.schedule == "sequential" or first.routing.iterations == 1:
            parents, traces = self._sequential(as_capsules(capsules))
        else:
            parents, traces = self._concurrent(as_capsules(capsules), first.routing.iterations)
        return (parents, traces) if trace else parents

    def _sequential(self, capsules: Capsules) -> tuple[Capsules, tuple[Trace, ...]]:
        traces = []
        for layer in self.layers:
            capsules, trace = layer(capsules, trace=True)
            traces.append(trace)
        return capsules, tuple(traces)

    def _concurrent(self, capsules: Capsules, iterations: int) -> tuple[Capsules, tuple[Trace, ...]]:
        states: list[list[State]] = [[] for _ in self.layers]
        below = capsules
        for layer, own in zip(self.layers, states, strict=True):
            own.append(_step(layer, below, None, 0))  # type: ignore[arg-type]
            below = own[-1].capsules()
        for t in range(1, iterations):
            # Old capsules on both sides: read them all before any is replaced.
            old = [capsules, *(own[-1].capsules() for own in states)]
            for layer, own, children in zip(self.layers, states, old[:-1], strict=True):
                own.append(_step(layer, children, own[-1], t))  # type: ignore[arg-type]
        return states[-1][-1].capsules(), tuple(Trace(tuple(own)) for own in states)


def _step(layer: CapsuleLayer, capsules: Capsules, state: State | None, t: int) -> State:
    """Take one step of a layer's routing on these children."""
    children = layer.enter(capsules)
    with without_autocast(children.pose):
        p, votes = layer.p(), layer.make_votes(children)
        if state is None:
            state = layer.routing.init(p, votes, children)
        return layer.routing.step(p, votes, children, state, t)
