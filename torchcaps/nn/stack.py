"""Stack of capsule layers with a schedule for their routing iterations."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast

from torch import Tensor, nn

from torchcaps.capsules import Capsules, as_capsules, disable_autocast
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing.base import State, Trace

__all__ = ["CapsuleStack"]


class CapsuleStack(nn.Module):
    """Sequence of capsule layers with a schedule for their routing iterations: Tsai 2020, Procedure 2.

    ``"concurrent"``: the first iteration runs bottom up, each layer on the new parents of the layer below. In every
    further iteration all layers step at once, each on the capsules of the layer below from the *previous* iteration.

    ``"sequential"``: a layer finishes its iterations before the next one starts, as in other papers (ablation B).

    With one iteration both are equal; the first layer is equal for any number of iterations.

    Args:
        layers: `DenseCapsules` and `ConvCapsules` from bottom to top, or a dict of them by name. The concurrent
            schedule needs equal numbers of iterations, and gradients through all of them, because a layer never reads
            the last iteration of the layer below.
        schedule: see above.

    Shapes:
        input of the first layer ``->`` output of the last layer

    >>> import torch
    >>> from torchcaps.nn import ConvCapsules, DenseCapsules
    >>> options = {"routing": "inverted_attention", "pose": "matrix"}
    >>> grid = ConvCapsules(4, 16, 4, 16, kernel_size=3, **options)
    >>> stack = CapsuleStack([grid, DenseCapsules(36, 16, 5, 16, **options)])
    >>> stack(torch.randn(2, 5, 5, 4, 16)).pose.shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        layers: Iterable[CapsuleLayer] | Mapping[str, CapsuleLayer],
        schedule: Literal["concurrent", "sequential"] = "concurrent",
    ) -> None:
        super().__init__()
        if not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a sequence or dict of capsule layers, got {type(layers).__name__}")
        named = cast(dict[str, CapsuleLayer], dict(layers)) if isinstance(layers, Mapping) else None
        given = cast(list[CapsuleLayer], list(layers)) if named is None else list(named.values())
        for layer in given:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(f"layers must be DenseCapsules or ConvCapsules, got {type(layer).__name__}")
        self.layers: nn.ModuleList | nn.ModuleDict = nn.ModuleList(given) if named is None else nn.ModuleDict(named)
        self.schedule = schedule
        if schedule not in ("concurrent", "sequential"):
            raise ValueError(f"schedule must be 'concurrent' or 'sequential', got {schedule!r}")
        if not self.layers:
            raise ValueError("layers must contain at least one capsule layer, got none")
        if schedule == "concurrent":
            self._check_concurrent()

    def _check_concurrent(self) -> None:
        """Raise a ValueError if the routings can't be iterated concurrently."""
        routings = [layer.routing for layer in self._capsule_layers()]
        counts = [routing.iterations for routing in routings]
        if len(set(counts)) > 1:
            raise ValueError(f"layers must have equal numbers of iterations with schedule='concurrent', got {counts}")
        for routing in routings[:-1]:
            if counts[0] > 1 and getattr(routing, "gradient", "full") != "full":
                raise ValueError(
                    f"layers must have gradient='full' with schedule='concurrent', got {routing}: the layer above "
                    "reads only earlier iterations, so no gradient would reach this layer; use schedule='sequential'"
                )

    def extra_repr(self) -> str:
        """Return the schedule for ``repr``."""
        return f"schedule={self.schedule!r}"

    def _capsule_layers(self) -> list[CapsuleLayer]:
        """Return the layers in order."""
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        return cast(list[CapsuleLayer], list(layers))

    def forward(
        self, capsules: Capsules | Tensor, trace: bool = False
    ) -> Capsules | tuple[Capsules, tuple[Trace, ...]]:
        """Route through all layers; if ``trace`` is True, also return the trace of every layer."""
        capsules = as_capsules(capsules)
        iterations = self._capsule_layers()[0].routing.iterations
        if self.schedule == "sequential" or iterations == 1:
            parents, traces = self._sequential(capsules, trace)
        else:
            parents, traces = self._concurrent(capsules, iterations, trace)
        return (parents, traces) if trace else parents

    def _sequential(self, capsules: Capsules, trace: bool) -> tuple[Capsules, tuple[Trace, ...]]:
        """Finish the routing of each layer before that of the next."""
        traces = []
        for layer in self._capsule_layers():
            if trace:
                capsules, states = layer(capsules, trace=True)
                traces.append(states)
            else:
                capsules = layer(capsules)
        return capsules, tuple(traces)

    def _concurrent(self, capsules: Capsules, iterations: int, trace: bool) -> tuple[Capsules, tuple[Trace, ...]]:
        """Update all layers in each iteration, from the previous iteration of the layer below."""
        layers = self._capsule_layers()
        now: list[State] = []
        for layer in layers:
            below = now[-1].capsules() if now else capsules
            now.append(_step(layer, below, None, 0, trace))
        history = [now]
        for t in range(1, iterations):
            # A step reaches the top one iteration later per layer above it, so the last steps of lower layers
            # matter only for the trace.
            lowest = 0 if trace else max(0, len(layers) - (iterations - t))
            below = [capsules, *(state.capsules() for state in now[:-1])]  # capsules of the previous iteration
            steps = [_step(layers[n], below[n], now[n], t, trace) for n in range(lowest, len(layers))]
            now = now[:lowest] + steps
            if trace:
                history.append(now)
        traces = tuple(Trace(states) for states in zip(*history, strict=True)) if trace else ()
        return now[-1].capsules(), traces


def _step(layer: CapsuleLayer, capsules: Capsules, state: State | None, t: int, trace: bool) -> State:
    """Run one routing iteration of a layer."""
    children = layer.check_children(capsules)
    with disable_autocast(children.pose):
        coefficients, votes = layer.coefficients.named(), layer.make_votes(children, trace)
        if state is None:
            state = layer.routing.init(coefficients, votes, children)
        return layer.routing.step(coefficients, votes, children, state, t)
