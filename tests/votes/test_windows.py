"""Windows of a convolution: padding, chunks of slots, gathering by index and by views."""

import pytest
import torch

from torchcaps.votes import StreamedVotes, Wiring, same_padding


@pytest.mark.parametrize(("size", "kernel", "stride"), [(28, 3, 2), (7, 3, 2), (5, 5, 1), (9, 2, 3), (4, 1, 2)])
def test_trap_51_same_padding_follows_tensorflow(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel, stride)
    assert after - before in (0, 1)
    assert (size + before + after - kernel) // stride + 1 == -(-size // stride)
    if (size, kernel, stride) == (28, 3, 2):
        assert (before, after) == (0, 1)


def test_windows_by_views_equal_gathering_by_index() -> None:
    wiring = Wiring(3, (6, 5), (3, 2), (2, 1), (1, 0, 0, 1))
    x = torch.randn(2, 6, 5, 3, 4)
    gathered = wiring.gather(x)
    padded = wiring.pad(x)
    for start, stop in wiring.chunk_ranges(2):
        (view,) = wiring.windows(padded, start, stop)
        torch.testing.assert_close(view, gathered[:, :, :, start:stop], rtol=0, atol=0)
    assert gathered.shape == (2, *wiring.sites, wiring.n_slots, 4)
    torch.testing.assert_close(wiring.unpad(padded), x, rtol=0, atol=0)


def test_chunks_have_the_given_size() -> None:
    votes = StreamedVotes(torch.randn(2, 6, 4), torch.randn(6, 4, 3, 4), None, 1, Wiring(6), max_slots=4)
    assert list(votes.wiring.chunk_ranges(4)) == [(0, 4), (4, 6)]
    assert votes.dense().shape == (2, 6, 3, 4)
    assert not votes.detach().dense().requires_grad
