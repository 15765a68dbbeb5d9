"""`route`: apply a routing algorithm to a tensor of votes, without a layer."""

from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from torchcaps._core.validation import check_finite, check_float, check_magnitude, check_non_negative
from torchcaps.capsules import Capsules, as_capsules, disable_autocast
from torchcaps.routing.base import Geometry, Routing, Trace, as_routing, run_routing
from torchcaps.votes import DenseVotes

__all__ = ["route"]


@overload
def route(
    votes: Tensor,
    routing: Routing | str,
    activation: Tensor | None = None,
    *,
    children: Tensor | None = None,
    coefficients: Mapping[str, Tensor] | None = None,
    trace: Literal[False] = False,
) -> Capsules: ...
@overload
def route(
    votes: Tensor,
    routing: Routing | str,
    activation: Tensor | None = None,
    *,
    children: Tensor | None = None,
    coefficients: Mapping[str, Tensor] | None = None,
    trace: Literal[True],
) -> tuple[Capsules, Trace]: ...
def route(
    votes: Tensor,
    routing: Routing | str,
    activation: Tensor | None = None,
    *,
    children: Tensor | None = None,
    coefficients: Mapping[str, Tensor] | None = None,
    trace: bool = False,
) -> Capsules | tuple[Capsules, Trace]:
    """Route votes to parents.

    Args:
        votes: ``[B, I, J, D]``, the pose that each of ``I`` children predicts for each of ``J`` parents.
        routing: the algorithm, or its name.
        activation: the children's activations ``[B, I]``, for algorithms that use them.
        children: the children's poses ``[B, I, K]``, for algorithms that read them besides the votes.
        coefficients: tensors of the algorithm by name, such as priors. Missing ones take their initial value if it is a
            constant; randomly initialised ones must be given.
        trace: also return the states of every iteration.

    Returns:
        `Capsules` with pose ``[B, J, D]``; if ``trace`` is True, a pair of capsules and `Trace`.

    >>> import torch, torchcaps
    >>> torchcaps.route(torch.randn(2, 32, 10, 16), "dynamic").pose.shape
    torch.Size([2, 10, 16])
    """
    routing = as_routing(routing)
    check_float(votes, "votes")
    if votes.dim() != 4:
        raise ValueError(f"votes must have the axes [B, I, J, D], got {list(votes.shape)}")
    _, slots, parents, dim = votes.shape
    if not slots * parents * dim:
        raise ValueError(f"votes must have at least one child, parent and pose element, got {list(votes.shape)}")
    if activation is not None and (not isinstance(activation, Tensor) or activation.shape != votes.shape[:2]):
        got = list(activation.shape) if isinstance(activation, Tensor) else type(activation).__name__
        raise ValueError(f"activation must be a tensor {list(votes.shape[:2])}, one value per child, got {got}")
    if children is None:
        if routing.reads_children:
            raise ValueError(
                f"children must be given for {type(routing).__name__}, which reads the poses of the children: a tensor "
                f"[{votes.shape[0]}, {slots}, K]"
            )
        # Other algorithms use the children for activations, dtype and device only.
        poses = votes[:, :, 0]
    else:
        poses = children
        if not isinstance(children, Tensor) or children.dim() != 3 or children.shape[:2] != votes.shape[:2]:
            got = list(children.shape) if isinstance(children, Tensor) else type(children).__name__
            raise ValueError(f"children must be a tensor [{votes.shape[0]}, {slots}, K], one pose per child, got {got}")
        if not children.shape[-1]:
            raise ValueError(f"children must have at least one pose element, got {list(children.shape)}")
        check_float(children, "children")
        if children.dtype != votes.dtype:
            raise ValueError(f"children must have the dtype of the votes, {votes.dtype}, got {children.dtype}")
    geometry = Geometry(slots, parents, dim, rows=1, columns=dim, types=slots, child_dim=poses.shape[-1])
    routing.check(geometry)
    if routing.residual:
        raise ValueError(f"{routing} adds the children to the parents, which can't be computed from votes: use a layer")
    capsules = as_capsules(Capsules(poses, activation), "children")
    check_finite(votes, "votes")
    check_finite(children, "children")
    check_finite(activation, "activation")
    check_non_negative(activation, "activation")
    factors = [votes] if activation is None else [votes, activation]
    check_magnitude(routing.max_vote(votes.dtype), f"votes of {type(routing).__name__}", "votes", *factors)
    if coefficients is not None and not isinstance(coefficients, Mapping):
        raise TypeError(f"coefficients must be a mapping of names to tensors, got {type(coefficients).__name__}")
    tensors = dict(coefficients or {})
    declared = routing.coefficients(geometry)
    for name, value in tensors.items():
        if name not in declared:
            raise ValueError(f"unknown coefficient {name!r}: {routing} has {sorted(declared) or 'none'}")
        if not isinstance(value, Tensor):
            raise TypeError(f"coefficients[{name!r}] must be a tensor, got {type(value).__name__}")
    for name, coefficient in declared.items():
        size = geometry.size(coefficient.axes)
        if name not in tensors:
            if callable(coefficient.init):
                raise ValueError(
                    f"{type(routing).__name__} has {name!r}, which is initialised at random: use a layer, or "
                    f"pass coefficients={{{name!r}: ...}} of shape {list(size)}"
                )
            tensors[name] = votes.new_full(size, coefficient.init, dtype=coefficient.dtype)
        elif tensors[name].shape != torch.Size(size):
            raise ValueError(f"coefficients[{name!r}] must have shape {list(size)}, got {list(tensors[name].shape)}")
        elif not tensors[name].is_floating_point():
            tensors[name] = tensors[name].to(coefficient.dtype or votes.dtype)  # such as a mask of bools
        elif tensors[name].dtype not in (votes.dtype, coefficient.dtype):
            raise ValueError(
                f"coefficients[{name!r}] must have the dtype of the votes, {votes.dtype}, got {tensors[name].dtype}"
            )
        check_finite(tensors[name], f"coefficients[{name!r}]")
    with disable_autocast(votes):
        result, states = run_routing(routing, tensors, DenseVotes(votes, routing.wire(slots)), capsules, trace)
    return (result, states) if trace else result
