"""Capsule layers: fully connected (`DenseCapsules`) and convolutional (`ConvCapsules`)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor, nn

from torchcaps._core.validation import check_finite, check_magnitude, check_non_negative
from torchcaps.capsules import Capsules, as_capsules, disable_autocast
from torchcaps.nn.coefficients import Coefficients
from torchcaps.nn.dropout import ImageDropout
from torchcaps.nn.sizes import Pair, as_count, as_padding, as_pair, as_rows, resolve_padding
from torchcaps.routing.base import Geometry, Routing, Trace, as_routing, run_routing
from torchcaps.votes import DenseVotes, StreamedVotes, Votes, Wiring
from torchcaps.votes.dispatch import VotePath, assumed_batch_size, choose_path

__all__ = ["CapsuleLayer", "ConvCapsules", "DenseCapsules"]

Init = float | Callable[[Tensor], object] | None
VotesFactory = Callable[["CapsuleLayer", Capsules, bool], Votes]  # layer, checked children, couplings


class CapsuleLayer(nn.Module, ABC):
    """Base class of capsule layers: weights, the routing's coefficients, and stored or streamed votes.

    Under autocast a layer computes in the dtype of its weights: routing is a fixed-point iteration, and half precision
    would distort its sums and exponentials. Inside ``torch.vmap`` and forward-mode differentiation votes are stored.

    Attributes:
        dropout: dropout of the input capsules, if the routing has any (`Attention`); otherwise ``None``. Another
            module, or another ``layer.dropout.p``, replaces the routing's.
        votes_factory: replaces `default_votes` in this layer, if not ``None``: a function of the layer, its checked
            children and whether couplings are needed. Profiling counts with it, benchmarks use their own votes.

    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing="em")
    >>> isinstance(layer, CapsuleLayer), layer.geometry.slots, layer.routing.iterations
    (True, 32, 2)
    """

    votes_factory: VotesFactory | None = None

    def __init__(
        self,
        routing: Routing,
        geometry: Geometry,
        weight_size: tuple[int, ...],
        streamed: bool | Literal["auto"],
        init: Init,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if not isinstance(streamed, bool) and (not isinstance(streamed, str) or streamed != "auto"):
            raise ValueError(f"streamed must be True, False or 'auto', got {streamed!r}")
        if not (init is None or callable(init) or (isinstance(init, int | float) and 0 <= init < math.inf)):
            raise ValueError(f"init must be a standard deviation of at least 0 or a function, got {init!r}")
        routing.check(geometry)
        self.routing = routing
        self.geometry = geometry
        self.streamed: bool | Literal["auto"] = streamed
        self._init = init
        self.weight: nn.Parameter = nn.Parameter(torch.empty(weight_size, device=device, dtype=dtype))
        size = (1 if geometry.shared else geometry.slots, *geometry.size(("J", "D")))
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if routing.vote_bias else None
        )
        self.coefficients: Coefficients = Coefficients(routing, geometry, device, dtype)
        self.dropout: nn.Module | None = ImageDropout(routing.dropout) if routing.dropout else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights and coefficients as in the routing's paper or code; vote biases are 0.

        No-op on the meta device, where there are no values and torch would load its compiler.
        """
        if self.weight.is_meta:
            return
        if not isinstance(self.weight, nn.Parameter):
            self.weight.zero_()
        elif self._init is None:
            self.routing.init_weight(self.weight, self.geometry)
        elif callable(self._init):
            self._init(self.weight)
        else:
            self.weight.normal_(0, self._init)
        if self.bias is not None:
            self.bias.zero_()
        for name, coefficient in self.routing.coefficients(self.geometry).items():
            coefficient.fill(self.coefficients[name])

    # Implemented by the two layers -----------------------------------------------------------------------------

    @abstractmethod
    def _check_shape(self, children: Capsules) -> Capsules:
        """Check the shape of the input; return it in the layout of this layer."""

    @abstractmethod
    def _wiring(self, children: Capsules) -> Wiring:
        """Return the wiring for this input."""

    def _slot_weight(self, wiring: Wiring) -> Tensor:
        """Return the weight of each slot, ``[I, X, J, Y]`` or ``[*L, I, X, J, Y]``."""
        return self.weight

    # ---------------------------------------------------------------------------------------------------------

    def check_children(self, capsules: Capsules | Tensor) -> Capsules:
        """Check the input (shapes, non-finite and negative values); return it in the dtype of the layer's weights."""
        children = self._check_shape(as_capsules(capsules))
        check_finite(children.pose, "capsules.pose")
        check_finite(children.activation, "capsules.activation")
        check_non_negative(children.activation, "capsules.activation")
        dtype = self.weight.dtype
        activation = None if children.activation is None else children.activation.to(dtype)
        return Capsules(children.pose.to(dtype), activation)

    def votes(self, capsules: Capsules | Tensor) -> Votes:
        """Return the votes of an input; its method ``dense()`` returns the tensor ``[B, *L, I, J, D]``."""
        children = self.check_children(capsules)
        with disable_autocast(children.pose):
            return self.make_votes(children)

    def make_votes(self, children: Capsules, couplings: bool = False) -> Votes:
        """Return the votes of checked children (see `check_children`).

        Args:
            children: the children.
            couplings: whether the couplings are needed, as in a trace; otherwise routing may not compute them.
        """
        limit = self.routing.max_vote(self.weight.dtype)
        kind, columns = f"votes of {type(self.routing).__name__}", self.geometry.columns
        factors = [self.weight, *(tensor for tensor in children if tensor is not None)]
        check_magnitude(limit, kind, "capsules or weight", *factors, scale=columns)
        if self.votes_factory is not None:
            return self.votes_factory(self, children, couplings)
        return self.default_votes(children, couplings)

    def default_votes(self, children: Capsules, couplings: bool = False) -> Votes:
        """Return stored or streamed votes, as `torchcaps.votes.dispatch` chooses."""
        inputs = self.vote_inputs(children)
        if self.path(inputs[0], inputs[-1]).is_streamed:
            return StreamedVotes(*inputs, couplings=couplings)
        return DenseVotes.make(*inputs)

    def vote_inputs(self, children: Capsules) -> tuple[Tensor, Tensor, Tensor | None, int, Wiring]:
        """Return the arguments of the votes: children after dropout, weight of each slot, bias, rows, wiring."""
        wiring = self._wiring(children)
        pose = children.pose if self.dropout is None else self.dropout(children.pose)
        offset = self.routing.vote_offset(self.geometry, wiring, pose)
        bias = self.bias
        if bias is not None and self.geometry.shared:
            bias = bias.expand(wiring.n_slots, -1, -1)
        bias = bias if offset is None else offset if bias is None else bias + offset
        return pose, self._slot_weight(wiring), bias, self.geometry.rows, wiring

    def path(self, pose: Tensor, wiring: Wiring) -> VotePath:
        """Return the computation path for these children; see `torchcaps.votes.dispatch.choose_path`."""
        lanes = assumed_batch_size(pose.shape[0])
        for size in wiring.sites:
            lanes *= size
        n_votes = lanes * wiring.n_slots * self.geometry.parents * self.geometry.dim
        return choose_path(self.streamed, self.weight, n_votes * pose.element_size(), lanes)

    @overload
    def forward(self, capsules: Capsules | Tensor, trace: Literal[False] = False) -> Capsules: ...
    @overload
    def forward(self, capsules: Capsules | Tensor, trace: Literal[True]) -> tuple[Capsules, Trace]: ...
    def forward(self, capsules: Capsules | Tensor, trace: bool = False) -> Capsules | tuple[Capsules, Trace]:
        """Route children to parents; if ``trace`` is True, also return the states of every iteration."""
        children = self.check_children(capsules)
        with disable_autocast(children.pose):
            parents, states = run_routing(
                self.routing, self.coefficients.named(), self.make_votes(children, trace), children, trace
            )
        return (parents, states) if trace else parents


class DenseCapsules(CapsuleLayer):
    """Fully-connected capsule layer: every child votes for every parent, with a matrix per pair.

    Args:
        children: number of child capsules, ``I``.
        child_dim: their pose size, ``K``.
        parents: number of parent capsules, ``J``.
        parent_dim: their pose size, ``D``.
        routing: the algorithm, or its name.
        shared: one matrix (and vote bias) per parent for all children, instead of one per pair. The number of children
            may then vary between calls, unless the routing has coefficients for each child.
        pose: ``"vector"``: ``v = W p``. ``"matrix"``: poses are square matrices and ``V = P W``. An int: poses are
            matrices with that number of rows, which the transform preserves (Chen 2019).
        poses: if False, the parents have activations only, and poses of zeros: there are no matrices.
        streamed: ``False`` stores the votes, ``True`` recomputes them in chunks, ``"auto"`` chooses by their size (see
            `torchcaps.votes.dispatch`).
        init: initial standard deviation of the matrices, or a function that fills them in place; default: as in the
            routing's paper.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Shapes:
        pose ``[B, I, K]`` or ``[B, *G, N, K]`` with ``I`` capsules in all ``-> [B, J, D]``

    >>> import torch
    >>> layer = DenseCapsules(1152, 8, 10, 16, routing="dynamic")
    >>> layer(torch.randn(2, 1152, 8)).pose.shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        children: int,
        child_dim: int,
        parents: int,
        parent_dim: int,
        *,
        routing: Routing | str,
        pose: Literal["vector", "matrix"] | int = "vector",
        shared: bool = False,
        poses: bool = True,
        streamed: bool | Literal["auto"] = "auto",
        init: Init = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        counts = {"children": children, "child_dim": child_dim, "parents": parents, "parent_dim": parent_dim}
        for name, count in counts.items():
            as_count(count, name)
        rows = as_rows(pose, child_dim, parent_dim)
        columns = child_dim // rows
        geometry = Geometry(children, parents, parent_dim, rows, columns, children, child_dim, shared=shared)
        weight_size = (1 if shared else children, columns, parents, parent_dim // rows)
        super().__init__(as_routing(routing), geometry, weight_size, streamed, init, device, dtype)
        if not poses:
            if self.routing.presence != "activation":
                raise ValueError(f"poses=False needs a routing with activations, got {self.routing}")
            del self.weight
            self.register_buffer("weight", torch.zeros(weight_size, device=device, dtype=dtype), persistent=False)
        by_child = any("I" in coefficient.axes for coefficient in self.routing.coefficients(geometry).values())
        self._any_number = shared and not by_child

    def _check_shape(self, children: Capsules) -> Capsules:
        """Return the children as ``[B, I, K]``; raise a ValueError for another number or size of them."""
        shape = children.pose.shape
        expected = f"[B, {self.geometry.types}, {self.geometry.child_dim}]"
        if len(shape) not in (3, 5):
            raise ValueError(f"capsules.pose must be {expected}, or on a grid [B, H, W, N, K], got {list(shape)}")
        children = children.flatten()
        n_children = children.pose.shape[1] if self._any_number else self.geometry.types
        if children.pose.shape[1:] != (n_children, self.geometry.child_dim):
            raise ValueError(
                f"capsules.pose must be {expected}: {self.geometry.types} children of size {self.geometry.child_dim}, "
                f"got {list(shape)}: {children.pose.shape[1]} of size {shape[-1]}"
            )
        return children

    def _wiring(self, children: Capsules) -> Wiring:
        """Return which child each vote slot reads."""
        return self.routing.wire(children.pose.shape[1])

    def _slot_weight(self, wiring: Wiring) -> Tensor:
        """Return the weights with one matrix per vote slot and parent, repeated if slots share them."""
        return self.weight.expand(wiring.n_slots, -1, -1, -1) if self.geometry.shared else self.weight

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        g = self.geometry
        sizes = f"{g.types} x {g.child_dim} -> {g.parents} x {g.dim}, rows={g.rows}"
        shared = ", shared=True" if g.shared else ""
        return f"{sizes}{shared}, {self.routing}, streamed={self.streamed}"


class ConvCapsules(CapsuleLayer):
    """Convolutional capsule layer: the parents at each position receive the votes of a window of children.

    Args:
        child_types: number of child capsules per position, ``N``.
        child_dim: their pose size, ``K``.
        parent_types: number of parent capsules per position, ``J``.
        parent_dim: their pose size, ``D``.
        kernel_size, stride: size and stride of the window.
        padding: zero padding of the grid, or ``"same"``: TensorFlow's SAME, which pads an odd row at the end.
        routing, pose, streamed, init, device, dtype: as in `DenseCapsules`.
        weights: sharing of the matrices. ``"kernel"``: one per cell of the window, shared by all positions, as in any
            convolution. ``"position"``: one per cell and position. ``"type"``: one per child type, shared by all cells
            (the class layer of EM routing).
        grid: the children's grid ``(H, W)``. Required if there are parameters for every position: the couplings of
            `Trainable`, or ``weights="position"``.

    Shapes:
        pose ``[B, H, W, N, K] -> [B, H', W', J, D]``

    >>> import torch
    >>> layer = ConvCapsules(32, 16, 32, 16, kernel_size=3, stride=2, routing="inverted_attention", pose="matrix")
    >>> layer(torch.randn(2, 16, 16, 32, 16)).pose.shape
    torch.Size([2, 7, 7, 32, 16])
    """

    def __init__(
        self,
        child_types: int,
        child_dim: int,
        parent_types: int,
        parent_dim: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | Literal["same"] = 0,
        *,
        routing: Routing | str,
        pose: Literal["vector", "matrix"] | int = "vector",
        streamed: bool | Literal["auto"] = "auto",
        weights: Literal["kernel", "position", "type"] = "kernel",
        grid: int | Pair | None = None,
        init: Init = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        counts = {"child_types": child_types, "child_dim": child_dim}
        counts |= {"parent_types": parent_types, "parent_dim": parent_dim}
        for name, count in counts.items():
            as_count(count, name)
        if weights not in ("kernel", "position", "type"):
            raise ValueError(f"weights must be 'kernel', 'position' or 'type', got {weights!r}")
        routing = as_routing(routing)
        rows = as_rows(pose, child_dim, parent_dim)
        self.kernel_size: Pair = as_pair(kernel_size, "kernel_size")
        self.stride: Pair = as_pair(stride, "stride")
        self.padding: Pair | Literal["same"] = as_padding(padding)
        self.grid: Pair | None = None if grid is None else as_pair(grid, "grid")
        self.weights = weights
        sites = None if self.grid is None else self._wire(self.grid, child_types, routing).sites
        cells = self.kernel_size[0] * self.kernel_size[1]
        by_type = routing.slot_kind == "type"
        geometry = Geometry(
            slots=child_types if by_type else cells * child_types,
            parents=parent_types,
            dim=parent_dim,
            rows=rows,
            columns=child_dim // rows * (cells if by_type else 1),
            types=child_types,
            child_dim=child_dim,
            children_per_slot=cells if by_type else 1,
            sites=sites,
        )
        weight_size = (geometry.slots, geometry.columns, parent_types, parent_dim // rows)
        if weights == "type":
            weight_size = (child_types, child_dim // rows, *weight_size[2:])
        elif weights == "position":
            if sites is None:
                raise ValueError("grid must be given with weights='position': it determines the number of positions")
            weight_size = (*sites, *weight_size)
        super().__init__(routing, geometry, weight_size, streamed, init, device, dtype)

    def _wire(self, grid: tuple[int, int], types: int, routing: Routing) -> Wiring:
        """Return the wiring of a window over a grid of child types."""
        padding = resolve_padding(self.padding, grid, self.kernel_size, self.stride)
        return routing.wire(types, grid=grid, kernel=self.kernel_size, stride=self.stride, padding=padding)

    def _check_shape(self, children: Capsules) -> Capsules:
        """Return the children; raise a ValueError for other types, size or grid than those of the layer."""
        shape, geometry = children.pose.shape, self.geometry
        if len(shape) != 5:
            raise ValueError(
                f"capsules.pose must be [B, H, W, {geometry.types}, {geometry.child_dim}], got {list(shape)}"
            )
        if shape[3:] != (geometry.types, geometry.child_dim):
            raise ValueError(
                f"capsules.pose must have {geometry.types} child types of size {geometry.child_dim} per position, "
                f"got {list(shape)}: {shape[3]} of size {shape[4]}"
            )
        if self.grid is not None and shape[1:3] != self.grid:
            raise ValueError(
                f"capsules.pose must be on the grid {list(self.grid)} of the layer, got {list(shape[1:3])}"
            )
        return children

    def _wiring(self, children: Capsules) -> Wiring:
        """Return which child each vote slot reads."""
        grid = (children.pose.shape[1], children.pose.shape[2])
        return self._wire(grid, self.geometry.types, self.routing)

    def _slot_weight(self, wiring: Wiring) -> Tensor:
        """Return the weights with one matrix per vote slot and parent, repeated if slots share them."""
        if self.weights != "type":
            return self.weight
        if self.routing.slot_kind == "type":
            return self.weight.repeat(1, wiring.cells, 1, 1)
        return self.weight.repeat(wiring.cells, 1, 1, 1)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        g = self.geometry
        parts = [f"{g.types} x {g.child_dim} -> {g.parents} x {g.dim}", f"kernel_size={self.kernel_size}"]
        parts += [f"stride={self.stride}", f"padding={self.padding!r}", f"rows={g.rows}", str(self.routing)]
        parts += [f"streamed={self.streamed}", f"weights={self.weights!r}"]
        return ", ".join(parts)
