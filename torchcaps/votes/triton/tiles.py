"""Parts of the Triton kernels, for a tile of votes ``[M, N]``; constants as in `torchcaps.votes.triton.kernels`."""

import triton
import triton.language as tl

__all__ = [
    "compute_votes",
    "locate_children",
    "locate_columns",
    "locate_rows",
    "locate_windows",
    "pair_offsets",
    "parent_offsets",
    "softmax_over_parents",
    "sum_components",
    "vote_gradient",
]


@triton.jit
def locate_rows(block, n_rows, A: tl.constexpr, BS: tl.constexpr, BA: tl.constexpr):
    """Return the index of each row's lane (or child position) in the block, its row of a pose, whether both exist."""
    m = tl.arange(0, BS * BA)
    index, line = m // BA, m % BA
    return index, line, (block * BS + index < n_rows) & (line < A)


@triton.jit
def locate_columns(block, J: tl.constexpr, Y: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr):
    """Return the parent of each column, its column of a vote, and whether both exist."""
    n = tl.arange(0, BJ * BY)
    parent, out = block * BJ + n // BY, n % BY
    return parent, out, (parent < J) & (out < Y)


@triton.jit
def locate_children(
    pose, image, top, left, line, exists, kind, cell,
    A: tl.constexpr, X: tl.constexpr, TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K1: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the pose rows at a cell of the windows that begin at (top, left); mask the padding."""
    row, column = top + cell // K1, left + cell % K1
    inside = exists & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    position = (image.to(tl.int64) * H + row) * W + column
    return pose + (position * TYPES + kind) * (A * X) + line * X, inside


@triton.jit
def compute_votes(
    pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
    HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K1: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the votes ``[M, N]`` of a slot."""
    votes = tl.zeros((M, N), tl.float32)
    column = parent * Y + out
    for part in range(PARTS):
        kind = slot if BY_TYPE else slot % TYPES
        cell = part if BY_TYPE else slot // TYPES
        child, inside = locate_children(pose, image, top, left, line, row_exists, kind, cell, A, X, TYPES, H, W, K1)
        matrix = weight + slot * slot_step + part * (X * J * Y) + column
        for x in range(X):
            p = tl.load(child + x, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(matrix + x * (J * Y), mask=column_exists, other=0.0).to(tl.float32)
            votes += p[:, None] * w[None, :]
    if HAS_BIAS:
        offset = (slot * J + parent)[None, :] * (A * Y) + (line * Y)[:, None] + out[None, :]
        exists = row_exists[:, None] & column_exists[None, :]
        votes += tl.load(bias + offset, mask=exists, other=0.0).to(tl.float32)
    return votes


@triton.jit
def parent_offsets(lane, line, parent, out, A: tl.constexpr, J: tl.constexpr, Y: tl.constexpr):
    """Return the offsets ``[M, N]`` in a tensor ``[lanes, J, A * Y]``, from the block's first lane."""
    return (lane * (J * A * Y) + line * Y)[:, None] + (parent * (A * Y) + out)[None, :]


@triton.jit
def pair_offsets(lane, slot, parent, n_slots, J: tl.constexpr):
    """Return the offsets ``[lanes, parents]`` in a tensor ``[lanes, slots, J]``, from the block's first lane."""
    return ((lane * n_slots + slot) * J)[:, None] + parent[None, :]


@triton.jit
def locate_windows(first, lane, L0: tl.constexpr, L1: tl.constexpr,
             S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):  # fmt: skip
    """Return the image of each lane, counted from a block's first lane, and the corner of its window."""
    site = (first + lane) % (L0 * L1)
    return (first + lane) // (L0 * L1), site // L1 * S0 - P0, site % L1 * S1 - P1


@triton.jit
def sum_components(tile):
    """Sum over the components of each vote: ``[BS, BA, BJ, BY] -> [BS, BJ]``."""
    return tl.sum(tl.sum(tile, 3), 1)


@triton.jit
def softmax_over_parents(logits, parent_exists, LEAK: tl.constexpr):
    """Return the softmax over parents of logits ``[BS, BJ]``."""
    logits = tl.where(parent_exists[None, :], logits, float("-inf"))
    largest = tl.max(logits, 1)
    if LEAK:
        largest = tl.maximum(largest, 0.0)
    power = tl.exp(logits - largest[:, None])
    total = tl.sum(power, 1)
    if LEAK:
        total += tl.exp(-largest)
    return power / total[:, None]


@triton.jit
def vote_gradient(
    pose, weight, bias, pairs, factor, other_pairs, other, slot_step, n_slots, slot,
    first, lane, image, top, left, line, row_exists, parent, out, column_exists,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K1: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the votes ``[M, N]`` of a slot, with pairs ``u [S, I, J]`` and factors ``f [S, J, D]``.

    They are read from the lane ``first`` on, ``lane`` is counted from there.

    FORM is ``"product"``: ``u f``; ``"two_products"``: ``u f + u' f'``; ``"square"``: ``2 u f (v - f')``.
    """
    exists = row_exists[:, None] & column_exists[None, :]
    at_pair = pair_offsets(lane, slot, parent, n_slots, J)
    at_parent = parent_offsets(lane, line, parent, out, A, J, Y)
    pairs += first * n_slots * J
    factor += first * (J * A * Y)
    other += first * (J * A * Y)
    gradient = tl.load(pairs + at_pair, mask=exists, other=0.0).to(tl.float32)
    gradient *= tl.load(factor + at_parent, mask=exists, other=0.0).to(tl.float32)
    if FORM == "two_products":
        second = tl.load(other_pairs + first * n_slots * J + at_pair, mask=exists, other=0.0).to(tl.float32)
        gradient += second * tl.load(other + at_parent, mask=exists, other=0.0).to(tl.float32)
    if FORM == "square":
        votes = compute_votes(
            pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
            HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, M, N,
        )  # fmt: skip
        gradient *= 2 * (votes - tl.load(other + at_parent, mask=exists, other=0.0).to(tl.float32))
    return gradient
