"""Label formats; errors are tested in tests/bad_input."""

import pytest
import torch

from torchcaps._core.labels import as_multi_hot, check_class_indices, split_labels

HOT = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_class_indices_are_returned_as_int64(dtype: torch.dtype) -> None:
    indices = check_class_indices(torch.tensor([0, 2], dtype=dtype), 3)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_multi_hot_rows_are_returned_unchanged(dtype: torch.dtype) -> None:
    rows = HOT.to(dtype)
    assert as_multi_hot(rows, 4) is rows
    assert as_multi_hot(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_range_is_not_checked_on_the_meta_device() -> None:
    assert check_class_indices(torch.tensor([7]).to("meta"), 3).shape == (1,)


def test_split_class_indices_of_one_object() -> None:
    indices, hot = split_labels(torch.tensor([2, 0]), 3)
    assert indices.tolist() == [2, 0]
    assert hot.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert split_labels(hot, 3)[0].tolist() == [2, 0]


def test_split_class_indices_of_two_objects_keep_their_order() -> None:
    indices, hot = split_labels(torch.tensor([[3, 1], [0, 2]]), 4, 2)
    assert indices.tolist() == [[3, 1], [0, 2]]
    assert hot.tolist() == HOT.tolist()


@pytest.mark.parametrize("rows", [HOT, HOT.bool()], ids=["int", "bool"])
def test_split_multi_hot_rows_gives_ascending_indices(rows: torch.Tensor) -> None:
    indices, hot = split_labels(rows, 4, 2)
    assert indices.tolist() == [[1, 3], [0, 2]]
    assert hot.tolist() == rows.tolist()


def test_integers_of_ambiguous_shape_are_class_indices() -> None:
    assert split_labels(torch.tensor([[0, 1], [1, 0]]), 2, 2)[0].tolist() == [[0, 1], [1, 0]]
