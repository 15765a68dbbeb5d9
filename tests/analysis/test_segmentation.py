"""Two digits told apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.analysis.test_reconstruction import Templates
from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, relative_rms
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment

SIDE = 36


def bars() -> Tensor:
    """A picture for each class: six rows from the row ``3 * class`` on, so that neighbours share half of their ink."""
    pictures = torch.zeros(10, 1, SIDE, SIDE)
    for number in range(10):
        pictures[number, :, 3 * number : 3 * number + 6] = 0.9
    return pictures


def scene(shift: int, pairs: list[list[int]]) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model that draws for each class the picture of the one ``shift`` further; images, labels and targets."""
    model: Any = narrow("sabour2017_multimnist").eval()
    pictures = bars()
    model.decoder = Templates(pictures.roll(-shift, 0))
    labels = torch.tensor(pairs)
    targets = pictures[labels]
    return model, targets.sum(1).clamp(max=1), labels, targets


def test_a_decoder_that_draws_the_targets_scores_1() -> None:
    found = segment(*scene(0, [[0, 1], [4, 7]]))
    assert found.iou_by_label.tolist() == [[1, 1], [1, 1]]
    assert found.mean_by_label == 1
    assert torch.equal(found.masks_by_label, found.truth)


def test_the_neighbours_half_of_the_ink_scores_a_third() -> None:
    """Six rows each, three of them shared: 3 over 9."""
    found = segment(*scene(1, [[0, 2], [4, 7]]))
    assert found.iou_by_label.flatten().tolist() == pytest.approx([1 / 3] * 4, rel=SAME[torch.float32])


def test_swapped_digits_score_what_they_share() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7]])
    found = segment(model, images, labels, targets.flip(1))
    third = 1 / 3
    assert found.iou_by_label.flatten().tolist() == pytest.approx([third, third, 0, 0], rel=SAME[torch.float32])


def test_decodes_beside_the_ink_score_0() -> None:
    found = segment(*scene(2, [[0, 1], [4, 7]]))
    assert found.mean_by_label == 0


def test_the_baseline_gives_all_ink_to_both() -> None:
    """Of neighbours six of nine rows are each one's own, of digits apart six of twelve."""
    found = segment(*scene(0, [[0, 1], [4, 7]]))
    assert found.baseline.flatten().tolist() == pytest.approx([2 / 3, 2 / 3, 0.5, 0.5], rel=SAME[torch.float32])
    assert found.mean_baseline == pytest.approx(7 / 12, rel=SAME[torch.float32])


def test_the_image_is_the_sum_of_its_objects() -> None:
    """Where two faint ones lie over each other there is ink in the image, although none is over a half alone.

    Object 0 is rows 0 to 5, the last two faint, object 1 rows 4 to 9, the first two faint; one is faint in row 12 too.
    """
    model, images, labels, targets = scene(0, [[0, 1]])
    targets = torch.zeros_like(targets)
    targets[0, 0, :, 0:4], targets[0, 1, :, 6:10] = 0.9, 0.9
    targets[0, :, :, 4:6], targets[0, 0, :, 12] = 0.3, 0.3
    found = segment(model, images, labels, targets)
    assert found.truth.sum((2, 3)).tolist() == [[4 * SIDE, 4 * SIDE]]
    assert found.baseline.flatten().tolist() == pytest.approx([4 / 10, 4 / 10], rel=SAME[torch.float32])
    dark = segment(model, images, labels, targets.clamp(max=0.3), threshold=0.25)
    assert dark.baseline.flatten().tolist() == pytest.approx([7 / 11, 6 / 11], rel=SAME[torch.float32])


def test_predictions_are_scored_in_the_places_of_their_labels() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7], [2, 9]])
    found = segment(model, images, labels, targets)
    told = bars()[found.predictions].amax(2) > 0.5
    assert torch.equal(found.masks_by_prediction, told)
    hits = found.predictions == labels
    assert bool((found.iou_by_prediction[hits] == 1).all())
    assert bool((found.iou_by_prediction[~hits] < 1).all())


def test_absent_classes_are_neither_labels_nor_predicted() -> None:
    model, images, labels, targets = scene(0, [[0, 1], [4, 7]] * 20)
    found = segment(model, images, labels, targets)
    both = torch.cat([found.labels, found.predictions], dim=1)
    assert not bool((both == found.absent[:, None]).any())
    assert len(found.absent.unique()) > 2
    assert torch.equal(found.absent_decoded, bars()[found.absent])
    assert found.absent_ink[0] == pytest.approx(6 / 9, rel=SAME[torch.float32])
    assert torch.equal(segment(model, images, labels, targets).absent, found.absent)
    assert not torch.equal(segment(model, images, labels, targets, seed=1).absent, found.absent)


def test_nothing_decoded_for_an_absent_class_is_no_ink() -> None:
    model, images, labels, targets = scene(0, [[0, 1]])
    model.decoder = Templates(torch.full((10, 1, SIDE, SIDE), 0.1))
    found = segment(model, images, labels, targets)
    assert found.mean_absent_foreground == 0
    assert segment(model, images, labels, targets, threshold=0.05).mean_absent_foreground == pytest.approx(SIDE / 9)


def test_two_empty_masks_agree() -> None:
    empty, full = torch.zeros(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 2, dtype=torch.bool)
    assert intersection_over_union(torch.cat([empty, empty, full]), torch.cat([empty, full, full])).tolist() == [
        1,
        0,
        1,
    ]


def test_it_is_of_the_models_own_decodes() -> None:
    model: Any = narrow("sabour2017_multimnist").eval()
    images, labels, targets = batch(model, 5)
    found = segment(model, images, labels, targets, batch_size=2)
    output = model(images)
    assert relative_rms(found.by_label, model.decode(output, labels)) < SAME[torch.float32]
    assert relative_rms(found.absent_decoded, model.decode(output, found.absent)) < SAME[torch.float32]
    assert abs(found.mean_by_label - float(found.iou_by_label.double().mean())) < EXACT


def test_what_makes_no_sense_is_refused() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, targets = batch(model, 2)
    with pytest.raises(ValueError, match="threshold must lie between"):
        segment(model, images, labels, targets, threshold=1.0)
    one: Any = narrow("sabour2017_mnist")
    with pytest.raises(ValueError, match="needs images of several objects"):
        segment(one, *batch(one, 2))
    plain: Any = narrow("tsai2020_diverse_matrix")
    with pytest.raises(ValueError, match="segmentation needs a decoder"):
        segment(plain, images, labels, targets)
    few: Any = narrow("sabour2017_multimnist", classes=4)
    with pytest.raises(ValueError, match="neither label nor prediction"):
        segment(few, images, labels, targets)


def test_it_is_drawn(tmp_path: Path) -> None:
    found = segment(*scene(0, [[0, 1], [4, 7], [2, 9]]))
    assert isinstance(found, Segmentation)
    draw_segmentation(found, tmp_path / "pairs.svg", "a model", n=4)
    text = (tmp_path / "pairs.svg").read_text()
    assert "R:l(" in text
    assert "R:p(" in text
    assert "*)" in text
    with pytest.raises(ValueError, match="n must be 2"):
        draw_segmentation(found, tmp_path / "pairs.svg", n=1)
