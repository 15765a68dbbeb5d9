"""Triton kernels: reductions of votes that exist in registers only, and the gradients of children, weights and biases.

A program handles a tile of votes ``[M, N]`` of one slot at a time. A row ``m`` is a lane (an image at an output
position) and a row ``a`` of its poses, a column ``n`` is a parent ``j`` and a column ``y`` of its pose, so that a tile
is a matrix product of the children with the slot's weights. Sizes are padded to powers of two and masked.

Sums over slots or lanes that several programs share are stored per program and added by torch: results do not depend
on the order in which programs run. Products are in float32, not TF32; inputs may be bfloat16.

Constants (``tl.constexpr``), equal for all kernels:
    A, X, J, Y: rows and columns of a child's pose, parents, columns of a vote.
    TYPES, H, W, L0, L1, K1, S0, S1, P0, P1: child types, children's grid, parents' grid, columns of the window, stride,
        padding before the grid. A dense layer is a grid of one position.
    CELLS: positions of the window. PARTS: children that one slot reads; 1, or CELLS if a slot is a type.
    BS, BA, BJ, BY, BX: block sizes of lanes, A, J, Y and X, powers of two; ``M = BS * BA``, ``N = BJ * BY``.
"""

# pyright: reportGeneralTypeIssues=false
# (a call of a jitted function outside of a kernel would not return)

import triton
import triton.language as tl

from torchcaps.votes.triton.tiles import (
    compute_votes,
    locate_children,
    locate_columns,
    locate_rows,
    locate_windows,
    pair_offsets,
    parent_offsets,
    softmax_over_parents,
    sum_components,
    vote_gradient,
)

__all__ = ["attend", "attend_backward", "pose_gradient", "reduce_to_pairs", "reduce_to_parents", "weight_gradient"]


# Reductions ---------------------------------------------------------------------------------------------------------


@triton.jit
def reduce_to_parents(
    pose, weight, bias, pairs, mean, total, n_lanes, n_slots, slot_step, slots_per_split,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Store the sum over a range of slots ``[splits, S, J, D]`` of ``c v``, ``c (v - mu)`` or ``c (v - mu)²``.

    KIND is ``"sum"``, ``"deviation"`` or ``"square"``. Grid: lanes, parents, splits of the slots.
    """
    lane, line, row_exists = locate_rows(tl.program_id(0), n_lanes, A, BS, BA)
    parent, out, column_exists = locate_columns(tl.program_id(1), J, Y, BJ, BY)
    first = tl.program_id(0) * BS
    image, top, left = locate_windows(first, lane, L0, L1, S0, S1, P0, P1)
    first = first.to(tl.int64)
    exists = row_exists[:, None] & column_exists[None, :]
    at_parent = parent_offsets(lane, line, parent, out, A, J, Y)
    if KIND != "sum":
        center = tl.load(mean + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    accumulated = tl.zeros((BS * BA, BJ * BY), tl.float32)
    start = tl.program_id(2) * slots_per_split
    for slot in range(start, tl.minimum(start + slots_per_split, n_slots)):
        value = compute_votes(
            pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
            HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
        )  # fmt: skip
        if KIND != "sum":
            value -= center
        if KIND == "square":
            value *= value
        at_pair = pair_offsets(lane, slot, parent, n_slots, J)
        coupling = tl.load(pairs + first * n_slots * J + at_pair, mask=exists, other=0.0).to(tl.float32)
        accumulated += coupling * value
    start_of_block = total + (tl.program_id(2).to(tl.int64) * n_lanes + first) * (J * A * Y)
    tl.store(start_of_block + at_parent, accumulated, mask=exists)


@triton.jit
def reduce_to_pairs(
    pose, weight, bias, factor, mean, result, n_lanes, n_slots, slot_step, slots_per_split,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Store the sum over components ``[S, I, J]`` of ``q v`` or ``w (v - mu)²``.

    KIND is ``"sum"`` or ``"square"``. Grid: lanes, parents, splits of the slots.
    """
    lane, line, row_exists = locate_rows(tl.program_id(0), n_lanes, A, BS, BA)
    parent, out, column_exists = locate_columns(tl.program_id(1), J, Y, BJ, BY)
    first = tl.program_id(0) * BS
    image, top, left = locate_windows(first, lane, L0, L1, S0, S1, P0, P1)
    first = first.to(tl.int64)
    exists = row_exists[:, None] & column_exists[None, :]
    at_parent = parent_offsets(lane, line, parent, out, A, J, Y)
    scale = tl.load(factor + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    if KIND == "square":
        center = tl.load(mean + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    lanes = tl.arange(0, BS)
    parents = tl.program_id(1) * BJ + tl.arange(0, BJ)
    pair_exists = (first + lanes < n_lanes)[:, None] & (parents < J)[None, :]
    start_of_block = result + first * n_slots * J
    start = tl.program_id(2) * slots_per_split
    for slot in range(start, tl.minimum(start + slots_per_split, n_slots)):
        value = compute_votes(
            pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
            HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
        )  # fmt: skip
        if KIND == "square":
            value -= center
            value *= value
        summed = sum_components(tl.reshape(scale * value, (BS, BA, BJ, BY)))
        tl.store(start_of_block + pair_offsets(lanes, slot, parents, n_slots, J), summed, mask=pair_exists)


@triton.jit
def attend(
    pose, weight, bias, query, total, n_lanes, n_slots, slot_step, slots_per_split,
    LEAK: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Store the sum over a range of slots of ``softmax_j <q, v> v``, ``[splits, S, J, D]``.

    A program has all parents (``BJ >= J``). Grid: lanes, 1, splits of the slots.
    """
    lane, line, row_exists = locate_rows(tl.program_id(0), n_lanes, A, BS, BA)
    parent, out, column_exists = locate_columns(0, J, Y, BJ, BY)
    first = tl.program_id(0) * BS
    image, top, left = locate_windows(first, lane, L0, L1, S0, S1, P0, P1)
    first = first.to(tl.int64)
    exists = row_exists[:, None] & column_exists[None, :]
    at_parent = parent_offsets(lane, line, parent, out, A, J, Y)
    queries = tl.load(query + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    queries = tl.reshape(queries, (BS, BA, BJ, BY))
    parent_exists = tl.arange(0, BJ) < J
    accumulated = tl.zeros((BS, BA, BJ, BY), tl.float32)
    start = tl.program_id(2) * slots_per_split
    for slot in range(start, tl.minimum(start + slots_per_split, n_slots)):
        votes = compute_votes(
            pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
            HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
        )  # fmt: skip
        votes = tl.reshape(votes, (BS, BA, BJ, BY))
        coupling = softmax_over_parents(sum_components(queries * votes), parent_exists, LEAK)
        accumulated += coupling[:, None, :, None] * votes
    start_of_block = total + (tl.program_id(2).to(tl.int64) * n_lanes + first) * (J * A * Y)
    tl.store(start_of_block + at_parent, tl.reshape(accumulated, (BS * BA, BJ * BY)), mask=exists)


# Gradients ----------------------------------------------------------------------------------------------------------


@triton.jit
def attend_backward(
    pose, weight, bias, query, gradient, coupling, logit_grad, query_grad, n_lanes, n_slots, slot_step, slots_per_split,
    LEAK: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Store couplings, gradients of the logits and, per split, of the query: the arguments of the other gradients.

    Grid: as in `attend`.
    """
    lane, line, row_exists = locate_rows(tl.program_id(0), n_lanes, A, BS, BA)
    parent, out, column_exists = locate_columns(0, J, Y, BJ, BY)
    first = tl.program_id(0) * BS
    image, top, left = locate_windows(first, lane, L0, L1, S0, S1, P0, P1)
    first = first.to(tl.int64)
    exists = row_exists[:, None] & column_exists[None, :]
    at_parent = parent_offsets(lane, line, parent, out, A, J, Y)
    queries = tl.load(query + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    queries = tl.reshape(queries, (BS, BA, BJ, BY))
    gradients = tl.load(gradient + first * (J * A * Y) + at_parent, mask=exists, other=0.0).to(tl.float32)
    gradients = tl.reshape(gradients, (BS, BA, BJ, BY))
    lanes, parents = tl.arange(0, BS), tl.arange(0, BJ)
    pair_exists = (first + lanes < n_lanes)[:, None] & (parents < J)[None, :]
    accumulated = tl.zeros((BS, BA, BJ, BY), tl.float32)
    start = tl.program_id(2) * slots_per_split
    for slot in range(start, tl.minimum(start + slots_per_split, n_slots)):
        votes = compute_votes(
            pose, weight, bias, slot_step, slot, image, top, left, line, row_exists, parent, out, column_exists,
            HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
        )  # fmt: skip
        votes = tl.reshape(votes, (BS, BA, BJ, BY))
        couplings = softmax_over_parents(sum_components(queries * votes), parents < J, LEAK)
        coupling_grads = sum_components(gradients * votes)
        mean = tl.sum(couplings * coupling_grads, 1)
        logit_grads = couplings * (coupling_grads - mean[:, None])
        at_pair = first * n_slots * J + pair_offsets(lanes, slot, parents, n_slots, J)
        tl.store(coupling + at_pair, couplings, mask=pair_exists)
        tl.store(logit_grad + at_pair, logit_grads, mask=pair_exists)
        accumulated += logit_grads[:, None, :, None] * votes
    start_of_block = query_grad + (tl.program_id(2).to(tl.int64) * n_lanes + first) * (J * A * Y)
    tl.store(start_of_block + at_parent, tl.reshape(accumulated, (BS * BA, BJ * BY)), mask=exists)


@triton.jit
def pose_gradient(
    pose, weight, bias, pairs, factor, other_pairs, other, pose_grad, n_positions, n_slots, slot_step,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr, CELLS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the children ``[B, H, W, TYPES, A * X]``; see `vote_gradient` for its arguments.

    A row is a child position instead of a lane: it gathers the gradient of every window that reads it, so that no two
    programs write to one child. Grid: child positions of all images times child types, on the only axis that CUDA does
    not limit to 65,535 programs.
    """
    block, kind = tl.program_id(0) // TYPES, tl.program_id(0) % TYPES
    index, line, row_exists = locate_rows(block, n_positions, A, BS, BA)
    position = block * BS + index
    first_image = block * BS // (H * W)
    first = first_image.to(tl.int64) * (L0 * L1)
    image, row, column = position // (H * W), position // W % H, position % W
    x = tl.arange(0, BX)
    accumulated = tl.zeros((BS * BA, BX), tl.float32)
    for cell in range(CELLS):
        slot = kind if BY_TYPE else cell * TYPES + kind
        part = cell if BY_TYPE else 0
        top, left = row - cell // K1, column - cell % K1  # of the window, in the grid without padding
        site_row, site_column = (top + P0) // S0, (left + P1) // S1
        is_read = row_exists & (top + P0 >= 0) & (left + P1 >= 0) & (site_row < L0) & (site_column < L1)
        is_read = is_read & (site_row * S0 == top + P0) & (site_column * S1 == left + P1)
        lane = ((image - first_image) * L0 + site_row) * L1 + site_column
        for parents in range((J + BJ - 1) // BJ):
            parent, out, column_exists = locate_columns(parents, J, Y, BJ, BY)
            gradient = vote_gradient(
                pose, weight, bias, pairs, factor, other_pairs, other, slot_step, n_slots, slot,
                first, lane, image, top, left, line, is_read, parent, out, column_exists,
                FORM, HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
            )  # fmt: skip
            matrix = weight + slot * slot_step + part * (X * J * Y) + (parent * Y + out)[:, None] + x[None, :] * (J * Y)
            exists = column_exists[:, None] & (x < X)[None, :]
            transposed = tl.load(matrix, mask=exists, other=0.0).to(tl.float32)
            accumulated += tl.dot(gradient, transposed, input_precision="ieee")
    start = (position.to(tl.int64) * TYPES + kind) * (A * X) + line * X
    tl.store(pose_grad + start[:, None] + x[None, :], accumulated, mask=row_exists[:, None] & (x < X)[None, :])


@triton.jit
def weight_gradient(
    pose, weight, bias, pairs, factor, other_pairs, other, weight_grad, bias_grad,
    n_lanes, n_slots, slot_step, blocks_per_split,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, BY_TYPE: tl.constexpr, PARTS: tl.constexpr,
    A: tl.constexpr, X: tl.constexpr, J: tl.constexpr, Y: tl.constexpr,
    TYPES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, L0: tl.constexpr, L1: tl.constexpr, K1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    BS: tl.constexpr, BA: tl.constexpr, BJ: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a slot's matrix and bias, summed over a range of lanes: ``[splits, I, X, J, Y]``.

    See `vote_gradient` for the arguments. Grid: slots times the children of a slot, parents, splits of the lanes.
    """
    slot, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    parent, out, column_exists = locate_columns(tl.program_id(1), J, Y, BJ, BY)
    kind = slot if BY_TYPE else slot % TYPES
    cell = part if BY_TYPE else slot // TYPES
    x = tl.arange(0, BX)
    accumulated = tl.zeros((BX, BJ * BY), tl.float32)
    summed = tl.zeros((BS * BA, BJ * BY), tl.float32)
    start = tl.program_id(2) * blocks_per_split
    for block in range(start, tl.minimum(start + blocks_per_split, (n_lanes + BS - 1) // BS)):
        lane, line, row_exists = locate_rows(block, n_lanes, A, BS, BA)
        image, top, left = locate_windows(block * BS, lane, L0, L1, S0, S1, P0, P1)
        first = block * tl.full((), BS, tl.int64)
        gradient = vote_gradient(
            pose, weight, bias, pairs, factor, other_pairs, other, slot_step, n_slots, slot,
            first, lane, image, top, left, line, row_exists, parent, out, column_exists,
            FORM, HAS_BIAS, BY_TYPE, PARTS, A, X, J, Y, TYPES, H, W, K1, BS * BA, BJ * BY,
        )  # fmt: skip
        child, inside = locate_children(pose, image, top, left, line, row_exists, kind, cell, A, X, TYPES, H, W, K1)
        exists = (x < X)[:, None] & inside[None, :]
        transposed = tl.load(child[None, :] + x[:, None], mask=exists, other=0.0).to(tl.float32)
        accumulated += tl.dot(transposed, gradient, input_precision="ieee")
        if HAS_BIAS:
            summed += gradient
    split = tl.program_id(2).to(tl.int64)
    row = (split * n_slots + slot) * (PARTS * X) + part * X + x
    exists = (x < X)[:, None] & column_exists[None, :]
    tl.store(weight_grad + (row * (J * Y))[:, None] + (parent * Y + out)[None, :], accumulated, mask=exists)
    if HAS_BIAS:
        of_line = tl.sum(tl.reshape(summed, (BS, BA, BJ * BY)), 0)
        line = tl.arange(0, BA)
        offset = ((split * n_slots + slot) * J + parent)[None, :] * (A * Y) + (line * Y)[:, None] + out[None, :]
        exists = (line < A)[:, None] & column_exists[None, :] & (part == 0)
        tl.store(bias_grad + offset, of_line, mask=exists)
