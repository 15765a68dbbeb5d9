"""`Capsules` and the functions around it; errors are tested in tests/bad_input."""

from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchcaps import Capsules
from torchcaps.capsules import as_capsules, disable_autocast, register_pytree


def test_bare_pose_becomes_capsules_without_activations() -> None:
    pose = torch.randn(2, 6, 4)
    capsules = as_capsules(pose)
    assert capsules.pose is pose
    assert capsules.activation is None
    assert as_capsules(capsules) is capsules


def test_flatten_merges_grid_and_types() -> None:
    capsules = Capsules(torch.randn(2, 3, 5, 4, 8), torch.rand(2, 3, 5, 4))
    flat = capsules.flatten()
    assert flat.pose.shape == (2, 60, 8)
    assert flat.activation is not None
    assert flat.activation.shape == (2, 60)
    assert flat.flatten() is flat
    torch.testing.assert_close(flat.length(), capsules.length().flatten(1))


def test_capsules_are_a_pytree_with_a_fixed_name() -> None:
    leaves, spec = pytree.tree_flatten(Capsules(torch.zeros(1, 2, 3), torch.zeros(1, 2)))
    assert len(leaves) == 2
    assert "torchcaps.Capsules" in pytree.treespec_dumps(spec)
    assert type(pytree.tree_unflatten(leaves, spec)) is Capsules


class Pair(NamedTuple):
    """A named tuple that is not registered yet."""

    first: torch.Tensor
    second: torch.Tensor


def test_register_pytree_makes_a_named_tuple_serialisable() -> None:
    register_pytree(Pair, "tests.Pair")
    _, spec = pytree.tree_flatten(Pair(torch.zeros(1), torch.zeros(2)))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_disable_autocast_keeps_the_dtype() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with disable_autocast(x):
            assert (x @ x).dtype == torch.float32
    with disable_autocast(x.to("meta")):  # a device without autocast
        pass
