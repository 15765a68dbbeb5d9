"""Segmentation of two overlapping objects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.analysis.test_reconstruction import Templates
from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, assert_different, relative_rms
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment

SIDE = 36


def bars() -> Tensor:
    """One image per class: six rows from row ``3 * class`` on, so that neighbours share half of their foreground."""
    images = torch.zeros(10, 1, SIDE, SIDE)
    for label in range(10):
        images[label, :, 3 * label : 3 * label + 6] = 0.9
    return images


def scene(shift: int, pairs: list[list[int]]) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model that decodes class ``c`` to the bar of class ``c + shift``; images, labels and targets."""
    model: Any = narrow("sabour2017_multimnist").eval()
    templates = bars()
    model.decoder = Templates(templates.roll(-shift, 0))
    labels = torch.tensor(pairs)
    targets = templates[labels]
    return model, targets.sum(1).clamp(max=1), labels, targets


def test_reconstructions_equal_to_the_targets_score_1() -> None:
    result = segment(*scene(0, [[0, 1], [4, 7]]))
    assert result.iou_by_label.tolist() == [[1, 1], [1, 1]]
    assert result.mean_by_label == 1
    torch.testing.assert_close(result.masks_by_label, result.truth)


def test_half_overlapping_masks_score_a_third() -> None:
    """Six rows each, three of them shared: 3 over 9."""
    result = segment(*scene(1, [[0, 2], [4, 7]]))
    assert result.iou_by_label.flatten().tolist() == pytest.approx([1 / 3] * 4, rel=SAME[torch.float32])


def test_swapped_objects_score_their_overlap() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7]])
    result = segment(model, images, labels, targets.flip(1))
    third = 1 / 3
    assert result.iou_by_label.flatten().tolist() == pytest.approx([third, third, 0, 0], rel=SAME[torch.float32])


def test_disjoint_masks_score_0() -> None:
    result = segment(*scene(2, [[0, 1], [4, 7]]))
    assert result.mean_by_label == 0


def test_the_baseline_uses_the_image_foreground_for_both_objects() -> None:
    """Six of nine rows for neighbours, six of twelve for disjoint objects."""
    result = segment(*scene(0, [[0, 1], [4, 7]]))
    assert result.baseline.flatten().tolist() == pytest.approx([2 / 3, 2 / 3, 0.5, 0.5], rel=SAME[torch.float32])
    assert result.mean_baseline == pytest.approx(7 / 12, rel=SAME[torch.float32])


def test_the_image_is_the_sum_of_its_objects() -> None:
    """Two faint objects overlap to foreground in the image, although neither exceeds the threshold alone.

    Object 0 is rows 0 to 5, the last two faint, object 1 rows 4 to 9, the first two faint; one is faint in row 12 too.
    """
    model, images, labels, targets = scene(0, [[0, 1]])
    targets = torch.zeros_like(targets)
    targets[0, 0, :, 0:4], targets[0, 1, :, 6:10] = 0.9, 0.9
    targets[0, :, :, 4:6], targets[0, 0, :, 12] = 0.3, 0.3
    result = segment(model, images, labels, targets)
    assert result.truth.sum((2, 3)).tolist() == [[4 * SIDE, 4 * SIDE]]
    assert result.baseline.flatten().tolist() == pytest.approx([4 / 10, 4 / 10], rel=SAME[torch.float32])
    faint = segment(model, images, labels, targets.clamp(max=0.3), threshold=0.25)
    assert faint.baseline.flatten().tolist() == pytest.approx([7 / 11, 6 / 11], rel=SAME[torch.float32])


def test_predictions_are_scored_at_the_positions_of_their_labels() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7], [2, 9]])
    result = segment(model, images, labels, targets)
    expected = bars()[result.predictions].amax(2) > 0.5
    torch.testing.assert_close(result.masks_by_prediction, expected)
    hits = result.predictions == labels
    assert (result.iou_by_prediction == 1).tolist() == hits.tolist()


def test_absent_classes_are_neither_labels_nor_predicted() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7]] * 20)
    result = segment(model, images, labels, targets)
    both = torch.cat([result.labels, result.predictions], dim=1)
    assert (both == result.absent[:, None]).nonzero().tolist() == []
    assert len(result.absent.unique()) > 2
    torch.testing.assert_close(result.absent_decoded, bars()[result.absent])
    assert result.absent_foreground[0] == pytest.approx(6 / 9, rel=SAME[torch.float32])
    assert segment(model, images, labels, targets).absent.tolist() == result.absent.tolist()
    assert_different(segment(model, images, labels, targets, seed=1).absent, result.absent)


def test_an_empty_reconstruction_of_an_absent_class_has_no_foreground() -> None:
    model, images, labels, targets = scene(0, [[0, 1]])
    model.decoder = Templates(torch.full((10, 1, SIDE, SIDE), 0.1))
    result = segment(model, images, labels, targets)
    assert result.mean_absent_foreground == 0
    assert segment(model, images, labels, targets, threshold=0.05).mean_absent_foreground == pytest.approx(SIDE / 9)


def test_two_empty_masks_have_an_iou_of_1() -> None:
    empty, full = torch.zeros(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 2, dtype=torch.bool)
    assert intersection_over_union(torch.cat([empty, empty, full]), torch.cat([empty, full, full])).tolist() == [
        1,
        0,
        1,
    ]


def test_masks_are_of_the_models_reconstructions() -> None:
    model: Any = narrow("sabour2017_multimnist").eval()
    images, labels, targets = batch(model, 5)
    result = segment(model, images, labels, targets, batch_size=2)
    output = model(images)
    assert relative_rms(result.by_label, model.decode(output, labels)) < SAME[torch.float32]
    assert relative_rms(result.absent_decoded, model.decode(output, result.absent)) < SAME[torch.float32]
    assert abs(result.mean_by_label - float(result.iou_by_label.double().mean())) < EXACT


def test_invalid_arguments_are_rejected() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, targets = batch(model, 2)
    with pytest.raises(ValueError, match="threshold"):
        segment(model, images, labels, targets, threshold=1.0)
    one: Any = narrow("sabour2017_mnist")
    with pytest.raises(ValueError, match="sabour2017_mnist"):
        segment(one, *batch(one, 2))
    plain: Any = narrow("tsai2020_diverse_matrix")
    with pytest.raises(ValueError, match="tsai2020_diverse_matrix"):
        segment(plain, images, labels, targets)
    few: Any = narrow("sabour2017_multimnist", classes=4)
    with pytest.raises(ValueError, match="classes, got 4"):
        segment(few, images, labels, targets)


def test_figure(tmp_path: Path) -> None:
    result = segment(*scene(0, [[0, 1], [4, 7], [2, 9]]))
    assert isinstance(result, Segmentation)
    draw_segmentation(result, tmp_path / "pairs.svg", "a model", n=4)
    text = (tmp_path / "pairs.svg").read_text()
    assert "R:l(" in text
    assert "R:p(" in text
    assert "*)" in text
    with pytest.raises(ValueError, match="n must"):
        draw_segmentation(result, tmp_path / "pairs.svg", n=1)
