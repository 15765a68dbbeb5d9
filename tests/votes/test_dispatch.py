"""Choice of the computation path: thresholds, kernel availability, small batches, and what is printed about it."""

import contextlib

import pytest
import torch

from tests.tolerances import SAME, relative_rms
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.conv import Convolution
from torchcaps.votes import DenseVotes, StreamedVotes, dispatch
from torchcaps.votes.dispatch import THRESHOLDS, VotePath, choose_path, describe_auto, override_thresholds

WEIGHT = torch.empty(8, 4, 3, 4, device="meta")
WIDE = torch.empty(8, 32, 3, 32, device="meta")
LARGE, MEDIUM, SMALL = dispatch.MAX_STORED_BYTES + 1, dispatch.MIN_KERNEL_BYTES + 1, dispatch.MIN_KERNEL_BYTES


@pytest.fixture(params=[True, False], ids=["kernel", "no_kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(dispatch, "has_kernel", lambda dtype: request.param and dtype is torch.float32)
    return request.param


def test_table_explains_every_threshold() -> None:
    for name, threshold in THRESHOLDS.items():
        assert getattr(dispatch, name) == threshold.value
        assert all((threshold.unit, threshold.meaning, threshold.measurement)), name
    constants = {name for name, value in vars(dispatch).items() if name.isupper() and isinstance(value, int)}
    assert constants == set(THRESHOLDS)


def test_thresholds_are_overridden_inside_the_context() -> None:
    before = dispatch.MIN_KERNEL_LANES, dispatch.MIN_KERNEL_BYTES
    with contextlib.suppress(RuntimeError), override_thresholds(MIN_KERNEL_LANES=1, MIN_KERNEL_BYTES=0):
        assert (dispatch.MIN_KERNEL_LANES, dispatch.MIN_KERNEL_BYTES) == (1, 0)
        raise RuntimeError("restored after an error, too")
    assert before == (dispatch.MIN_KERNEL_LANES, dispatch.MIN_KERNEL_BYTES)
    with pytest.raises(ValueError, match="'MIN_LANES'"), override_thresholds(MIN_LANES=1):
        pass


def test_explicit_option_wins(kernel: bool) -> None:
    for vote_bytes in (SMALL, MEDIUM, LARGE):
        assert choose_path(False, WEIGHT, vote_bytes, 64) is VotePath.STORED
        streamed = VotePath.STREAMED_KERNEL if kernel else VotePath.STREAMED_TORCH
        assert choose_path(True, WEIGHT, vote_bytes, 64) is streamed


def test_auto_chooses_by_size_lanes_and_kernel(kernel: bool) -> None:
    fast = VotePath.STREAMED_KERNEL if kernel else VotePath.STREAMED_TORCH
    enough, few = dispatch.MIN_KERNEL_LANES, dispatch.MIN_KERNEL_LANES - 1
    assert choose_path("auto", WEIGHT, SMALL, enough) is VotePath.STORED
    assert choose_path("auto", WEIGHT, MEDIUM, enough) is (fast if kernel else VotePath.STORED)
    assert choose_path("auto", WEIGHT, MEDIUM, few) is VotePath.STORED
    assert choose_path("auto", WEIGHT, LARGE - 1, few) is VotePath.STORED
    assert choose_path("auto", WEIGHT, LARGE, few) is fast


@pytest.mark.parametrize(
    "weight",
    [WIDE, WEIGHT.double(), WEIGHT.unsqueeze(0).unsqueeze(0)],
    ids=["wide_matrices", "dtype_without_kernel", "matrices_per_position"],
)
def test_kernel_is_not_chosen_for_unsuitable_weights(weight: torch.Tensor, kernel: bool) -> None:
    assert choose_path("auto", weight, MEDIUM, 64) is VotePath.STORED
    assert choose_path("auto", weight, LARGE, 64) is VotePath.STREAMED_TORCH


def test_layers_follow_the_choice(kernel: bool) -> None:
    layer = ConvCapsules(4, 16, 8, 16, 3, routing="dynamic")
    limit = dispatch.MIN_KERNEL_BYTES if kernel else dispatch.MAX_STORED_BYTES
    for grid in (4, 8):  # 4 and 36 output positions
        n_bytes = (grid - 2) ** 2 * 36 * 8 * 16 * 4  # positions, slots, parents, components, bytes
        votes = layer.votes(torch.zeros(1, grid, grid, 4, 16))
        assert type(votes) is (StreamedVotes if n_bytes > limit else DenseVotes)
    n_images = limit // (36 * 36 * 8 * 16 * 4) + 1
    assert type(layer.votes(torch.zeros(n_images, 8, 8, 4, 16))) is StreamedVotes
    dense = DenseCapsules(2048, 8, 10, 16, routing="dynamic")  # one lane per image
    assert type(dense.votes(torch.zeros(dispatch.MIN_KERNEL_LANES - 1, 2048, 8))) is DenseVotes
    expected = StreamedVotes if kernel else DenseVotes
    assert type(dense.votes(torch.zeros(dispatch.MIN_KERNEL_LANES, 2048, 8))) is expected


def test_description_names_the_thresholds() -> None:
    assert f"{dispatch.MIN_KERNEL_BYTES / 2**20:g} MiB" in describe_auto(True)
    for kernel in (True, False):
        assert f"{dispatch.MAX_STORED_BYTES / 2**20:g} MiB" in describe_auto(kernel)


def test_small_batches_are_convolved_by_a_matrix_product() -> None:
    most = dispatch.MAX_WINDOW_PRODUCT_BATCH
    layer = Convolution(64, 256, 9, 2)  # enough weights
    images = torch.randn(most, 64, 20, 20)
    assert not layer._uses_window_product(images)  # with gradients
    with torch.no_grad():
        by_product = layer(images)
        layer.plain = True
        assert relative_rms(by_product, layer(images)) < SAME[torch.float32]
        assert layer._uses_window_product(images)
        assert not layer._uses_window_product(torch.randn(most + 1, 64, 20, 20))
        assert not Convolution(64, 256, 9, padding=2)._uses_window_product(images)
        assert not Convolution(4, 4, 3)._uses_window_product(torch.randn(1, 4, 9, 9))
