"""In which order a stack of capsule layers iterates."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast

from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_capsules, disable_autocast
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
        layers: `DenseCapsules` and `ConvCapsules`, the lowest first, or a dictionary of them by name. To step
            concurrently they must have the same number of iterations, and their gradients must flow through all of
            them: the layer above never reads the last one.
        schedule: see above.

    Shapes:
        the lowest layer's input ``->`` the highest layer's output
    """

    def __init__(
        self,
        layers: Iterable[CapsuleLayer] | Mapping[str, CapsuleLayer],
        schedule: Literal["concurrent", "sequential"] = "concurrent",
    ) -> None:
        super().__init__()
        if not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a list of capsule layers, got {type(layers).__name__}")
        named = cast(dict[str, CapsuleLayer], dict(layers)) if isinstance(layers, Mapping) else None
        given = cast(list[CapsuleLayer], list(layers)) if named is None else list(named.values())
        for layer in given:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(f"layers must be DenseCapsules or ConvCapsules, got {type(layer).__name__}")
        self.layers = nn.ModuleList(given) if named is None else nn.ModuleDict(named)
        self.schedule = schedule
        if schedule not in ("concurrent", "sequential"):
            raise ValueError(f"schedule must be 'concurrent' or 'sequential', got {schedule!r}")
        if not self.layers:
            raise ValueError("layers must hold one capsule layer or more, got none")
        if schedule == "concurrent":
            self._check_concurrent()

    def _check_concurrent(self) -> None:
        routings = [layer.routing for layer in self._capsule_layers()]
        counts = [routing.iterations for routing in routings]
        if len(set(counts)) > 1:
            raise ValueError(f"layers must have the same number of iterations to step concurrently, got {counts}")
        for routing in routings[:-1]:
            if counts[0] > 1 and getattr(routing, "gradient", "full") != "full":
                raise ValueError(
                    f"layers that step concurrently must have gradient='full', got {routing}: the layer above reads "
                    "only earlier iterations, so no gradient would reach this one; take schedule='sequential'"
                )

    def extra_repr(self) -> str:
        """Say the schedule."""
        return f"schedule={self.schedule!r}"

    def _capsule_layers(self) -> list[CapsuleLayer]:
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        return cast(list[CapsuleLayer], list(layers))

    def forward(
        self, capsules: Capsules | Tensor, trace: bool = False
    ) -> Capsules | tuple[Capsules, tuple[Trace, ...]]:
        """Route through all layers; with ``trace`` return the states of every layer and iteration as well."""
        capsules = as_capsules(capsules)
        iterations = self._capsule_layers()[0].routing.iterations
        if self.schedule == "sequential" or iterations == 1:
            parents, traces = self._sequential(capsules, trace)
        else:
            parents, traces = self._concurrent(capsules, iterations, trace)
        return (parents, traces) if trace else parents

    def _sequential(self, capsules: Capsules, trace: bool) -> tuple[Capsules, tuple[Trace, ...]]:
        traces = []
        for layer in self._capsule_layers():
            if trace:
                capsules, states = layer(capsules, trace=True)
                traces.append(states)
            else:
                capsules = layer(capsules)
        return capsules, tuple(traces)

    def _concurrent(self, capsules: Capsules, iterations: int, trace: bool) -> tuple[Capsules, tuple[Trace, ...]]:
        layers = self._capsule_layers()
        now: list[State] = []
        for layer in layers:
            below = now[-1].capsules() if now else capsules
            now.append(_step(layer, below, None, 0, trace))
        history = [now]
        for t in range(1, iterations):
            # A layer's step reaches the top one iteration later for each layer above it: later ones only show in
            # the trace.
            lowest = 0 if trace else max(0, len(layers) - (iterations - t))
            below = [capsules, *(state.capsules() for state in now[:-1])]  # old capsules on both sides
            steps = [_step(layers[n], below[n], now[n], t, trace) for n in range(lowest, len(layers))]
            now = now[:lowest] + steps
            if trace:
                history.append(now)
        traces = tuple(Trace(states) for states in zip(*history, strict=True)) if trace else ()
        return now[-1].capsules(), traces


def _step(layer: CapsuleLayer, capsules: Capsules, state: State | None, t: int, trace: bool) -> State:
    """Take one step of a layer's routing on these children."""
    children = layer.enter(capsules)
    with disable_autocast(children.pose):
        p, votes = layer.p(), layer.make_votes(children, trace)
        if state is None:
            state = layer.routing.init(p, votes, children)
        return layer.routing.step(p, votes, children, state, t)
