"""Votes of one image by loops over output positions, cells of the window and capsule types."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Site:
    """The votes at one position of the parents' grid, for one image.

    ``votes[i][j][d]``; ``child[i]`` identifies the child in slot i (None: padding), ``activation[i]`` is its activation
    and ``coordinates[i]`` its position; ``position`` is that of the parents; ``children`` are the poses at the same
    position of the children's grid, for residuals; ``slots[i]`` is the pose that slot i reads, ``grid``
    the size of the children's grid.
    """

    votes: list
    child: list
    activation: list
    coordinates: list
    position: tuple = ()
    children: Any = None
    slots: Any = None
    grid: Any = None


@dataclass
class Parents:
    """Result of routing at one site: ``pose[j][d]``, ``activation[j]`` or None, ``coupling[i][j]``."""

    pose: list
    activation: list | None
    coupling: list


def tensorflow_same(size, kernel, stride):
    """Return TensorFlow's SAME padding (before, after): out = ceil(size / stride), the larger half after."""
    out = (size + stride - 1) // stride
    total = max(0, (out - 1) * stride + kernel - size)
    return (total // 2, total - total // 2)


def matrix_vote(pose, weight, rows):
    """Return one vote, flat: the child's matrix [rows][X] times weight [X][Y]."""
    columns, width = len(pose) // rows, len(weight[0])
    vote = []
    for a in range(rows):
        for y in range(width):
            vote.append(sum(pose[a * columns + x] * weight[x][y] for x in range(columns)))
    return vote


def weight_of(weights, i, j):
    """Return the matrix [X][Y] of slot i and parent j from weights [i][x][j][y]."""
    return [[weights[i][x][j][y] for y in range(len(weights[i][x][j]))] for x in range(len(weights[i]))]


def dense_sites(pose, activation, weight, bias, rows):
    """Return the site of a dense layer; pose [i][k], activation [i] or None, weight [i][x][j][y], bias [i][j][d]."""
    n_parents = len(weight[0][0])
    votes = []
    for i in range(len(pose)):
        votes.append([matrix_vote(pose[i], weight_of(weight, i, j), rows) for j in range(n_parents)])
        if bias is not None:
            for j in range(n_parents):
                votes[i][j] = [v + b for v, b in zip(votes[i][j], bias[i][j], strict=True)]
    active = [1.0] * len(pose) if activation is None else list(activation)
    return [Site(votes, list(range(len(pose))), active, [None] * len(pose), (), pose, pose)]


def conv_sites(pose, activation, weight, bias, rows, kernel, stride, padding, by_type):
    """Return the sites of a convolution; pose [h][w][n][k], weight [i][x][j][y], padding (top, bottom, left, right)."""
    height, width, types = len(pose), len(pose[0]), len(pose[0][0])
    size = len(pose[0][0][0])
    top, bottom, left, right = padding
    sites = []
    for row in range((height + top + bottom - kernel[0]) // stride[0] + 1):
        for column in range((width + left + right - kernel[1]) // stride[1] + 1):
            read = []  # for each capsule of the window: (cell, type, (h, w, n) or None for padding, (h, w))
            for k in range(kernel[0]):
                for l in range(kernel[1]):  # noqa: E741
                    h, w = row * stride[0] + k - top, column * stride[1] + l - left
                    inside = 0 <= h < height and 0 <= w < width
                    for n in range(types):
                        read.append((k * kernel[1] + l, n, (h, w, n) if inside else None, (h, w)))
            make_site = _type_site if by_type else _capsule_site
            site = make_site(pose, activation, weight, bias, rows, read, types, size)
            site.coordinates = [((h + 0.5) / height, (w + 0.5) / width) for _, _, _, (h, w) in read]
            site.position, site.grid = (row, column), (height, width)
            site.children = pose[row][column] if row < height and column < width else None
            sites.append(site)
    return sites


def _pose_of(pose, child, size):
    if child is None:
        return [0.0] * size
    h, w, n = child
    return pose[h][w][n]


def _capsule_site(pose, activation, weight, bias, rows, read, types, size):
    """Return a site in which every capsule of the window is a slot."""
    n_parents = len(weight[0][0])
    votes, children, active = [], [], []
    for cell, n, child_id, _ in read:
        slot = cell * types + n
        vote = [matrix_vote(_pose_of(pose, child_id, size), weight_of(weight, slot, j), rows) for j in range(n_parents)]
        if bias is not None:
            vote = [[v + b for v, b in zip(vote[j], bias[slot][j], strict=True)] for j in range(n_parents)]
        votes.append(vote)
        children.append(child_id)
        if child_id is None:
            active.append(0.0)
        else:
            active.append(1.0 if activation is None else activation[child_id[0]][child_id[1]][child_id[2]])
    slots = [_pose_of(pose, child_id, size) for _, _, child_id, _ in read]
    return Site(votes, children, active, [], slots=slots)


def _type_site(pose, activation, weight, bias, rows, read, types, size):
    """Return a site in which every child type is a slot: its vote is the sum over the cells of the window."""
    n_parents, columns = len(weight[0][0]), size // rows
    votes = []
    for n in range(types):
        vote = []
        for j in range(n_parents):
            kernel = weight_of(weight, n, j)  # [cells * X][Y]
            total = list(bias[n][j])
            for cell, m, child_id, _ in read:
                if m == n:
                    part = kernel[cell * columns : (cell + 1) * columns]
                    summand = matrix_vote(_pose_of(pose, child_id, size), part, rows)
                    total = [t + v for t, v in zip(total, summand, strict=True)]
            vote.append(total)
        votes.append(vote)
    return Site(votes, list(range(types)), [1.0] * types, [])
