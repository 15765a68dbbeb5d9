"""Whether capsules move along one direction: ratios, cosines, and what chance gives."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchcaps.analysis.directions import directions, draw_trajectories

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps import Capsules
from torchcaps.analysis.alignment import (
    align,
    alignment_ratio,
    capsule_differences,
    draw_alignment,
    draw_cosines,
    opposite_cosines,
    random_reference,
)
from torchcaps.models import Network


class Places(nn.Module):
    """Class capsules that are made of where the ink is, from the middle: each class in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])
        self.size = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, trace: bool = False) -> Capsules:
        height, width = images.shape[-2:]
        x = (images[:, 0].sum(1) * (torch.arange(width) - width // 2)).sum(1)
        y = (images[:, 0].sum(2) * (torch.arange(height) - height // 2)).sum(1)
        nothing = torch.zeros_like(x)
        poses = [
            (x, y, nothing),  # the place itself: one line, opposite ways
            (x.abs(), y.abs(), nothing),  # the same way to both sides
            (x, x * x, y),  # a bent way
        ]
        return Capsules(self.size * torch.stack([torch.stack(pose, dim=1) for pose in poses], dim=1))


def placer() -> Network:
    """A model whose class capsules are known functions of where the ink is."""
    model = narrow("sabour2017_mnist", classes=3, image=(1, 29, 29), reconstruction=False)
    model.front = nn.Sequential()
    model.capsules = Places()
    return model.double()


def dot() -> Tensor:
    image = torch.zeros(1, 1, 29, 29, dtype=torch.float64)
    image[..., 14, 14] = 1
    return image


# The ratio --------------------------------------------------------------------------------------------------


def test_trap_25_the_first_right_singular_vector_is_a_row() -> None:
    """Two orthogonal rows, the longer one along (0.6, 0.8, 0): it is the direction, and the other is across."""
    differences = torch.tensor([[6.0, 8, 0], [0, 0, 1], [-3, -4, 0]], dtype=torch.float64)
    ratio, direction = alignment_ratio(differences)
    assert largest_difference(ratio, [1.0, 0, 1]) < EXACT
    assert largest_difference(direction, [0.6, 0.8, 0]) < EXACT


def test_trap_25_no_mean_is_taken_away() -> None:
    """Two rows about (1, 0): with their mean taken away the direction would be (0, 1)."""
    ratio, direction = alignment_ratio(torch.tensor([[1.0, 0.1], [1, -0.1]], dtype=torch.float64))
    assert largest_difference(direction, [1.0, 0]) < EXACT
    assert largest_difference(ratio, [1 / math.sqrt(1.01)] * 2) < EXACT


def test_trap_25_differences_along_one_line_have_ratio_one() -> None:
    line = torch.randn(7, 1, 32, dtype=torch.float64)
    ratio, direction = alignment_ratio(torch.randn(7, 5, 1, dtype=torch.float64) * line)
    assert largest_difference(ratio, torch.ones(7, 5)) < EXACT
    along = (direction * line[:, 0] / line[:, 0].norm(dim=-1, keepdim=True)).sum(-1)
    assert largest_difference(along.abs(), torch.ones(7)) < EXACT


def test_trap_25_chance_gives_what_the_stated_procedure_does() -> None:
    """0.462 +- 0.269 for 5 of 32; a mean of 50,000 ratios is known to about 0.002."""
    mean, std = random_reference()
    assert mean == pytest.approx(0.462, abs=0.004)
    assert std == pytest.approx(0.269, abs=0.004)
    mean, std = random_reference(dim=16)
    assert mean == pytest.approx(0.497, abs=0.004)
    assert std == pytest.approx(0.278, abs=0.004)


def test_trap_25_the_printed_chance_is_that_of_the_wrong_axis() -> None:
    """0.311 +- 0.262 in the paper: the first column of VT."""
    mean, std = random_reference(axis="printed")
    assert mean == pytest.approx(0.311, abs=0.005)
    assert std == pytest.approx(0.262, abs=0.004)
    # By the stated procedure the direction holds a fifth of the squares at least, so that the root mean square is over
    # 0.447 but for what weighing by length does.
    assert math.hypot(mean, std) < 0.41 < 0.447 < math.hypot(*random_reference())


def test_trap_25_a_direction_has_the_sign_of_its_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sign the decomposition returns: direction and cosine stay."""
    differences = torch.randn(4, 6, 5, 8, dtype=torch.float64)
    ratio, direction = alignment_ratio(differences)
    assert bool(((differences * direction[..., None, :]).sum((-1, -2)) > 0).all())
    svd = torch.linalg.svd

    def flipped(matrix: Tensor, full_matrices: bool = True) -> Any:
        found = svd(matrix, full_matrices=full_matrices)
        return type(found)((-found.U, found.S, -found.Vh))

    monkeypatch.setattr(torch.linalg, "svd", flipped)
    other_ratio, other = alignment_ratio(differences)
    assert torch.equal(ratio, other_ratio)
    assert torch.equal(direction, other)
    assert torch.equal(opposite_cosines(direction)[0], opposite_cosines(other)[0])
    assert largest_difference(alignment_ratio(-differences)[1], -direction) < EXACT


def test_a_capsule_that_does_not_move_has_no_direction() -> None:
    differences = torch.zeros(2, 3, 4, dtype=torch.float64)
    differences[0, 1] = torch.tensor([0.0, 2, 0, 0])
    ratio, direction = alignment_ratio(differences)
    assert torch.equal(ratio, torch.tensor([[0.0, 1, 0], [0, 0, 0]], dtype=torch.float64))
    assert torch.equal(direction[0].abs(), torch.tensor([0.0, 1, 0, 0], dtype=torch.float64))
    assert torch.equal(direction[1], torch.zeros(4, dtype=torch.float64))


# Models -----------------------------------------------------------------------------------------------------


def test_known_capsules_have_known_ratios_and_cosines() -> None:
    result = align(placer(), dot().expand(3, -1, -1, -1), torch.arange(3))
    assert result.names == ("rotation +", "x +", "y +", "rotation -", "x -", "y -")
    shifts = [1, 2, 4, 5]
    assert largest_difference(result.ratios[:2, shifts], torch.ones(2, 4)) < SAME[torch.float32]
    assert largest_difference(result.cosines[0, 1:], [-1.0, -1]) < SAME[torch.float32]
    assert largest_difference(result.cosines[1, 1:], [1.0, 1]) < SAME[torch.float32]
    # The bent way by hand: v_i = (i, i²), and the angle of the first axis of a symmetric 2x2 matrix.
    squares = sum(i * i for i in range(1, 6)), sum(i**3 for i in range(1, 6)), sum(i**4 for i in range(1, 6))
    angle = math.atan2(2 * squares[1], squares[0] - squares[2]) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    expected = sum(abs(i * cos + i * i * sin) / math.hypot(i, i * i) for i in range(1, 6)) / 5
    assert largest_difference(result.ratios[2, [1, 4]], [expected] * 2) < SAME[torch.float32]
    assert float(result.cosines[2, 1]) == pytest.approx(sin * sin - cos * cos, abs=SAME[torch.float32])
    assert largest_difference(result.averages, result.ratios.mean(0)) < SAME[torch.float32]


def test_every_class_counts_the_same_however_many_images_it_has() -> None:
    """Three images of a class that moves along a line and one whose way is bent; a class without images is none."""
    labels = torch.tensor([0, 2, 0, 0])
    result = align(placer(), dot().expand(4, -1, -1, -1), labels)
    straight, bent = align(placer(), dot(), labels[:1]), align(placer(), dot(), labels[1:2])
    assert float(bent.averages[1]) < 0.999
    shifts = [1, 2, 4, 5]
    expected = (straight.averages + bent.averages) / 2
    assert largest_difference(result.averages[shifts], expected[shifts]) < SAME[torch.float32]


def test_plus_is_right_and_down() -> None:
    moves, numbers = capsule_differences(placer(), dot(), torch.tensor([0]))
    assert moves.shape == (1, 6, 5, 3)
    assert numbers.tolist() == [0]
    steps = torch.arange(1.0, 6)
    for side, place, sign in ((1, 0, 1), (2, 1, 1), (4, 0, -1), (5, 1, -1)):
        expected = torch.zeros(5, 3)
        expected[:, place] = sign * steps
        assert largest_difference(moves[0, side], expected) < EXACT
    right = torch.zeros(1, 1, 29, 29, dtype=torch.float64)
    right[..., 14, 24] = 1  # turned counter-clockwise, what is at the right goes up
    moves, _ = capsule_differences(placer(), right, torch.tensor([0]))
    assert bool((moves[0, 0, :, 1] < 0).all())
    assert bool((moves[0, 3, :, 1] > 0).all())


def test_images_that_move_nothing_are_left_out_of_the_means() -> None:
    images = torch.cat([dot(), torch.zeros_like(dot()), torch.zeros_like(dot())])
    result = align(placer(), images, torch.tensor([0, 0, 1]))
    assert result.n == (2, 1, 0)
    assert largest_difference(result.ratios[0, [1, 2, 4, 5]], [1.0] * 4) < SAME[torch.float32]
    assert torch.equal(result.ratios[1:], torch.zeros(2, 6))
    assert result.moved[:, 1].tolist() == [True, False, False]
    assert result.n_unmoved >= 2 * 30
    assert all(bool(torch.isfinite(x).all()) for x in (result.ratios, result.std, result.averages, result.cosines))


@pytest.mark.parametrize("name", ["sabour2017_mnist", "choi2019_mnist", "hinton2018_smallnorb", "tsai2020_cifar10"])
def test_every_model_with_class_capsules_can_be_asked(name: str) -> None:
    model = narrow(name)
    images, labels, _ = batch(model, 3)
    calls: list[int] = []
    result = align(model, images, labels, (10, 20), (1, 2), batch_size=2, progress=lambda: calls.append(1))
    assert model.training
    assert len(calls) == 2 * (1 + 6 * 2)
    assert result.ratios.shape == (model.spec.classes, 6)
    assert bool((result.ratios[:3] > 0).all())
    assert bool((result.ratios <= 1).all())
    assert result.cosines.shape == (3, 3)
    assert bool((result.cosines.abs() <= 1).all())
    # Two vectors are closer to one direction than five.
    assert result.reference[0] > random_reference()[0]


def test_before_the_tanh_is_the_affine_map_of_the_routed_sum() -> None:
    model = narrow("choi2019_mnist").double().eval()
    images, labels, _ = batch(model, 2)
    layer: Any = list(model.capsules.layers.children())[-1]  # type: ignore[union-attr]
    seen: list[Any] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    shifted = torch.zeros_like(images)
    shifted[..., 2:] = images[..., :-2]
    before = []
    with torch.no_grad():
        for each in (images, shifted):
            trace = model(each, trace=True).trace[-1]
            votes = layer.votes(seen[-1]).dense()
            total = (trace.couplings[0].unsqueeze(-1) * votes).sum(-3).flatten(1, -2)  # [B, J, D]
            raw = (
                torch.einsum("bjd,jde->bje", total, layer.coefficients.named()["matrix"])
                + layer.coefficients.named()["offset"]
            )
            before.append(raw[torch.arange(2), labels])
    handle.remove()
    moves, _ = capsule_differences(model, images, labels, (5,), (2,), before_tanh=True)
    assert relative_rms(moves[:, 1, 0], before[1] - before[0]) < SAME[torch.float64]
    after, _ = capsule_differences(model, images, labels, (5,), (2,))
    assert relative_rms(after[:, 1, 0], before[1].tanh() - before[0].tanh()) < SAME[torch.float64]


def test_saturated_capsules_stay_finite_before_the_tanh() -> None:
    model = narrow("choi2019_mnist")
    images, labels, _ = batch(model, 2)
    layer: Any = list(model.capsules.layers.children())[-1]  # type: ignore[union-attr]
    layer.coefficients["matrix"].data.mul_(1e4)
    result = align(model, images, labels, (5,), (2,), before_tanh=True)
    assert result.before_tanh
    assert bool(torch.isfinite(result.ratios).all())


def test_what_makes_no_sense_is_refused() -> None:
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 2)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"model": narrow("sabour2017_cnn_mnist")}, "needs class capsules"),
        ({"model": narrow("sabour2017_multimnist")}, "one object each"),
        ({"before_tanh": True}, "Attention routing"),
        ({"degrees": (5, 10)}, "as many"),
        ({"pixels": (0, 1, 2, 3, 4)}, "positive"),
        ({"labels": labels[:1]}, "one for each of 2"),
        ({"labels": labels + 9}, "0..9"),
        ({"images": images[0]}, r"\[N, C, H, W\]"),
    ]
    for changes, words in refusals:
        with pytest.raises(ValueError, match=words):
            align(**({"model": model, "images": images, "labels": labels} | changes))
    with pytest.raises(ValueError, match="axis must be"):
        random_reference(axis="left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floating-point"):
        alignment_ratio(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="finite"):
        alignment_ratio(torch.full((2, 3), torch.nan))


# Figure 5 ---------------------------------------------------------------------------------------------------


def test_directions_finds_the_capsule_that_moves_apart_and_the_one_that_does_not() -> None:
    found = directions(placer(), dot().expand(2, -1, -1, -1), torch.arange(2))
    assert found.cosines == pytest.approx((-1, 1), abs=SAME[torch.float32])
    assert found.labels == found.images == (0, 1)
    assert found.shown == pytest.approx((1, 1), abs=SAME[torch.float32])
    # The way is a line, + to the right; and on the way of class 1 both sides go right.
    steps = torch.arange(-5.0, 6)
    assert largest_difference(found.points[0, :, 0], steps) < SAME[torch.float32]
    assert largest_difference(found.points[1, :, 0], steps.abs()) < SAME[torch.float32]
    assert largest_difference(found.points[..., 1].abs(), torch.zeros(2, 11)) < SAME[torch.float32]
    assert largest_difference(found.arrows[:, :, 0], [[1.0, -1], [1, 1]]) < SAME[torch.float32]
    with pytest.raises(ValueError, match="none of these images"):
        directions(placer(), torch.zeros(1, 1, 29, 29), torch.tensor([0]))


def test_the_figures_are_written(tmp_path: Path) -> None:
    images, labels = dot().expand(2, -1, -1, -1), torch.arange(2)
    result = align(placer(), images, labels)
    draw_cosines(result, tmp_path / "cosines.png", "a title")
    draw_alignment(result, tmp_path / "ratios.png")
    draw_alignment(result, tmp_path / "named.svg", "a title", classes=("one", "two", "three"))
    draw_trajectories(directions(placer(), images, labels), tmp_path / "directions.png", "a title")
    names = ("cosines.png", "ratios.png", "named.svg", "directions.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)
    with pytest.raises(ValueError, match="3 names"):
        draw_alignment(result, tmp_path / "no.png", classes=("one",))
