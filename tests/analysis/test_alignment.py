"""Alignment of capsules: ratios, cosines, trajectories and the reference of random vectors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps import Capsules
from torchcaps.analysis.alignment import (
    alignment_ratio,
    capsule_differences,
    measure_alignment,
    opposite_cosines,
    random_reference,
)
from torchcaps.analysis.alignment_figures import draw_alignment, draw_cosines
from torchcaps.analysis.trajectories import draw_trajectories, find_trajectories
from torchcaps.models import Network


class CenterOfMass(nn.Module):
    """Class capsules that are functions of the centre of mass, relative to the image centre; another for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])
        self.size = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, trace: bool = False) -> Capsules:
        height, width = images.shape[-2:]
        x = (images[:, 0].sum(1) * (torch.arange(width) - width // 2)).sum(1)
        y = (images[:, 0].sum(2) * (torch.arange(height) - height // 2)).sum(1)
        zeros = torch.zeros_like(x)
        poses = [
            (x, y, zeros),  # opposite shifts move it in opposite directions along a line
            (x.abs(), y.abs(), zeros),  # opposite shifts move it in the same direction
            (x, x * x, y),  # along a curve
        ]
        return Capsules(self.size * torch.stack([torch.stack(pose, dim=1) for pose in poses], dim=1))


def position_model() -> Network:
    """A model whose class capsules are known functions of the position of the object."""
    model = narrow("sabour2017_mnist", classes=3, image=(1, 29, 29), reconstruction=False)
    model.front = nn.Sequential()
    model.capsules = CenterOfMass()
    return model.double()


def dot() -> Tensor:
    image = torch.zeros(1, 1, 29, 29, dtype=torch.float64)
    image[..., 14, 14] = 1
    return image


# The ratio --------------------------------------------------------------------------------------------------


def test_trap_25_the_first_right_singular_vector_is_a_row() -> None:
    """Two orthogonal rows: the direction is the longer one, (0.6, 0.8, 0)."""
    differences = torch.tensor([[6.0, 8, 0], [0, 0, 1], [-3, -4, 0]], dtype=torch.float64)
    ratio, direction = alignment_ratio(differences)
    assert largest_difference(ratio, [1.0, 0, 1]) < EXACT
    assert largest_difference(direction, [0.6, 0.8, 0]) < EXACT


def test_trap_25_no_mean_is_subtracted() -> None:
    """Two rows close to (1, 0): with their mean subtracted the direction would be (0, 1)."""
    ratio, direction = alignment_ratio(torch.tensor([[1.0, 0.1], [1, -0.1]], dtype=torch.float64))
    assert largest_difference(direction, [1.0, 0]) < EXACT
    assert largest_difference(ratio, [1 / math.sqrt(1.01)] * 2) < EXACT


def test_trap_25_differences_along_one_line_have_ratio_one() -> None:
    line = torch.randn(7, 1, 32, dtype=torch.float64)
    ratio, direction = alignment_ratio(torch.randn(7, 5, 1, dtype=torch.float64) * line)
    assert largest_difference(ratio, torch.ones(7, 5)) < EXACT
    along = (direction * line[:, 0] / line[:, 0].norm(dim=-1, keepdim=True)).sum(-1)
    assert largest_difference(along.abs(), torch.ones(7)) < EXACT


def test_trap_25_reference_of_random_vectors_by_the_described_procedure() -> None:
    """0.462 ± 0.269 for 5 vectors in 32 dimensions; the standard error of a mean of 50,000 ratios is about 0.002."""
    mean, std = random_reference()
    assert mean == pytest.approx(0.462, abs=0.004)
    assert std == pytest.approx(0.269, abs=0.004)
    mean, std = random_reference(dim=16)
    assert mean == pytest.approx(0.497, abs=0.004)
    assert std == pytest.approx(0.278, abs=0.004)


def test_trap_25_the_printed_reference_is_that_of_the_other_axis() -> None:
    """0.311 ± 0.262 in the paper: the first column of VT."""
    mean, std = random_reference(axis="column")
    assert mean == pytest.approx(0.311, abs=0.005)
    assert std == pytest.approx(0.262, abs=0.004)
    # By the described procedure the direction has at least a fifth of the squares: a root mean square above 0.447, up
    # to the weighting by length.
    assert math.hypot(mean, std) < 0.41 < 0.447 < math.hypot(*random_reference())


def test_trap_25_the_sign_of_a_direction_follows_its_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direction and cosine do not depend on the sign that the SVD returns."""
    differences = torch.randn(4, 6, 5, 8, dtype=torch.float64)
    ratio, direction = alignment_ratio(differences)
    assert float((differences * direction[..., None, :]).sum((-1, -2)).min()) > 0
    svd = torch.linalg.svd

    def flipped(matrix: Tensor, full_matrices: bool = True) -> Any:
        result = svd(matrix, full_matrices=full_matrices)
        return type(result)((-result.U, result.S, -result.Vh))

    monkeypatch.setattr(torch.linalg, "svd", flipped)
    other_ratio, other = alignment_ratio(differences)
    torch.testing.assert_close(other_ratio, ratio, rtol=0, atol=0)
    torch.testing.assert_close(other, direction, rtol=0, atol=0)
    torch.testing.assert_close(opposite_cosines(other)[0], opposite_cosines(direction)[0], rtol=0, atol=0)
    assert largest_difference(alignment_ratio(-differences)[1], -direction) < EXACT


def test_a_capsule_that_does_not_move_has_no_direction() -> None:
    differences = torch.zeros(2, 3, 4, dtype=torch.float64)
    differences[0, 1] = torch.tensor([0.0, 2, 0, 0])
    ratio, direction = alignment_ratio(differences)
    assert ratio.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert direction[0].abs().tolist() == [0, 1, 0, 0]
    assert direction[1].tolist() == [0, 0, 0, 0]


# Models -----------------------------------------------------------------------------------------------------


def test_known_capsules_have_known_ratios_and_cosines() -> None:
    result = measure_alignment(position_model(), dot().expand(3, -1, -1, -1), torch.arange(3))
    assert result.names == ("rotation +", "x +", "y +", "rotation -", "x -", "y -")
    shifts = [1, 2, 4, 5]
    assert largest_difference(result.ratios[:2, shifts], torch.ones(2, 4)) < SAME[torch.float32]
    assert largest_difference(result.cosines[0, 1:], [-1.0, -1]) < SAME[torch.float32]
    assert largest_difference(result.cosines[1, 1:], [1.0, 1]) < SAME[torch.float32]
    # The curve: v_i = (i, i²), and the angle of the first principal axis of a symmetric 2x2 matrix.
    squares = sum(i * i for i in range(1, 6)), sum(i**3 for i in range(1, 6)), sum(i**4 for i in range(1, 6))
    angle = math.atan2(2 * squares[1], squares[0] - squares[2]) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    expected = sum(abs(i * cos + i * i * sin) / math.hypot(i, i * i) for i in range(1, 6)) / 5
    assert largest_difference(result.ratios[2, [1, 4]], [expected] * 2) < SAME[torch.float32]
    assert float(result.cosines[2, 1]) == pytest.approx(sin * sin - cos * cos, abs=SAME[torch.float32])
    assert largest_difference(result.averages, result.ratios.mean(0)) < SAME[torch.float32]


def test_classes_are_averaged_without_weights() -> None:
    """Three images of a class on a line and one of a class on a curve; a class without images is excluded."""
    labels = torch.tensor([0, 2, 0, 0])
    result = measure_alignment(position_model(), dot().expand(4, -1, -1, -1), labels)
    straight, curved = (
        measure_alignment(position_model(), dot(), labels[:1]),
        measure_alignment(position_model(), dot(), labels[1:2]),
    )
    assert float(curved.averages[1]) < 0.999
    shifts = [1, 2, 4, 5]
    expected = (straight.averages + curved.averages) / 2
    assert largest_difference(result.averages[shifts], expected[shifts]) < SAME[torch.float32]


def test_plus_is_right_and_down() -> None:
    differences, labels = capsule_differences(position_model(), dot(), torch.tensor([0]))
    assert differences.shape == (1, 6, 5, 3)
    assert labels.tolist() == [0]
    steps = torch.arange(1.0, 6)
    for transformation, entry, sign in ((1, 0, 1), (2, 1, 1), (4, 0, -1), (5, 1, -1)):
        expected = torch.zeros(5, 3)
        expected[:, entry] = sign * steps
        assert largest_difference(differences[0, transformation], expected) < EXACT
    right = torch.zeros(1, 1, 29, 29, dtype=torch.float64)
    right[..., 14, 24] = 1  # a counter-clockwise rotation moves the right edge up
    differences, _ = capsule_differences(position_model(), right, torch.tensor([0]))
    assert float(differences[0, 0, :, 1].max()) < 0
    assert float(differences[0, 3, :, 1].min()) > 0


def test_differences_of_length_zero_are_excluded_from_the_means() -> None:
    images = torch.cat([dot(), torch.zeros_like(dot()), torch.zeros_like(dot())])
    result = measure_alignment(position_model(), images, torch.tensor([0, 0, 1]))
    assert result.n == (2, 1, 0)
    assert largest_difference(result.ratios[0, [1, 2, 4, 5]], [1.0] * 4) < SAME[torch.float32]
    assert result.ratios[1:].tolist() == [[0] * 6] * 2
    assert result.moved[:, 1].tolist() == [True, False, False]
    assert result.n_unmoved >= 2 * 30
    for values in (result.ratios, result.std, result.averages, result.cosines):
        assert values[~torch.isfinite(values)].tolist() == []


@pytest.mark.parametrize("name", ["sabour2017_mnist", "choi2019_mnist", "hinton2018_smallnorb", "tsai2020_cifar10"])
def test_every_model_with_class_capsules_has_an_alignment(name: str) -> None:
    model = narrow(name)
    images, labels, _ = batch(model, 3)
    calls: list[int] = []
    result = measure_alignment(model, images, labels, (10, 20), (1, 2), batch_size=2, progress=lambda: calls.append(1))
    assert model.training is True
    assert len(calls) == 2 * (1 + 6 * 2)
    assert result.ratios.shape == (model.spec.classes, 6)
    assert float(result.ratios[:3].min()) > 0
    assert float(result.ratios.max()) <= 1
    assert result.cosines.shape == (3, 3)
    assert float(result.cosines.abs().max()) <= 1
    # Two random vectors are closer to one direction than five.
    assert result.reference[0] > random_reference()[0]


def test_capsules_before_the_tanh_are_the_affine_map_of_the_weighted_sum() -> None:
    model = narrow("choi2019_mnist").double().eval()
    images, labels, _ = batch(model, 2)
    layer: Any = list(model.capsules.layers.children())[-1]  # type: ignore[union-attr]
    children: list[Any] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: children.append(inputs[0]))
    shifted = torch.zeros_like(images)
    shifted[..., 2:] = images[..., :-2]
    before = []
    with torch.no_grad():
        for each in (images, shifted):
            trace = model(each, trace=True).trace[-1]
            votes = layer.votes(children[-1]).dense()
            total = (trace.couplings[0].unsqueeze(-1) * votes).sum(-3).flatten(1, -2)  # [B, J, D]
            raw = (
                torch.einsum("bjd,jde->bje", total, layer.coefficients.named()["matrix"])
                + layer.coefficients.named()["offset"]
            )
            before.append(raw[torch.arange(2), labels])
    handle.remove()
    differences, _ = capsule_differences(model, images, labels, (5,), (2,), before_tanh=True)
    assert relative_rms(differences[:, 1, 0], before[1] - before[0]) < SAME[torch.float64]
    after, _ = capsule_differences(model, images, labels, (5,), (2,))
    assert relative_rms(after[:, 1, 0], before[1].tanh() - before[0].tanh()) < SAME[torch.float64]


def test_saturated_capsules_stay_finite_before_the_tanh() -> None:
    model = narrow("choi2019_mnist")
    images, labels, _ = batch(model, 2)
    layer: Any = list(model.capsules.layers.children())[-1]  # type: ignore[union-attr]
    layer.coefficients["matrix"].data.mul_(1e4)
    result = measure_alignment(model, images, labels, (5,), (2,), before_tanh=True)
    assert result.before_tanh is True
    assert result.ratios[~torch.isfinite(result.ratios)].tolist() == []


def test_invalid_arguments_are_rejected() -> None:
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": narrow("sabour2017_cnn_mnist")}, "sabour2017_cnn_mnist"),
        ({"model": narrow("sabour2017_multimnist")}, "sabour2017_multimnist"),
        ({"before_tanh": True}, "before_tanh"),
        ({"degrees": (5, 10)}, "degrees"),
        ({"pixels": (0, 1, 2, 3, 4)}, "pixels"),
        ({"labels": labels[:1]}, "labels .*1"),
        ({"labels": labels + 9}, r"labels .*0\.\.9"),
        ({"images": images[0]}, "images"),
    ]
    for changes, argument in cases:
        with pytest.raises(ValueError, match=argument):
            measure_alignment(**({"model": model, "images": images, "labels": labels} | changes))
    with pytest.raises(ValueError, match="axis"):
        random_reference(axis="left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differences"):
        alignment_ratio(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="differences"):
        alignment_ratio(torch.full((2, 3), torch.nan))


# Figure 5 ---------------------------------------------------------------------------------------------------


def test_trajectories_of_the_lowest_and_the_highest_cosine() -> None:
    result = find_trajectories(position_model(), dot().expand(2, -1, -1, -1), torch.arange(2))
    assert result.cosines == pytest.approx((-1, 1), abs=SAME[torch.float32])
    assert result.labels == result.images == (0, 1)
    assert result.plane_fractions == pytest.approx((1, 1), abs=SAME[torch.float32])
    # Lines: in class 0 positive amounts to the right, in class 1 all amounts to the right.
    steps = torch.arange(-5.0, 6)
    assert largest_difference(result.points[0, :, 0], steps) < SAME[torch.float32]
    assert largest_difference(result.points[1, :, 0], steps.abs()) < SAME[torch.float32]
    assert largest_difference(result.points[..., 1].abs(), torch.zeros(2, 11)) < SAME[torch.float32]
    assert largest_difference(result.arrows[:, :, 0], [[1.0, -1], [1, 1]]) < SAME[torch.float32]
    with pytest.raises(ValueError, match="trajectories"):
        find_trajectories(position_model(), torch.zeros(1, 1, 29, 29), torch.tensor([0]))


def test_figures(tmp_path: Path) -> None:
    images, labels = dot().expand(2, -1, -1, -1), torch.arange(2)
    result = measure_alignment(position_model(), images, labels)
    draw_cosines(result, tmp_path / "cosines.png", "a title")
    draw_alignment(result, tmp_path / "ratios.png")
    draw_alignment(result, tmp_path / "named.svg", "a title", classes=("one", "two", "three"))
    draw_trajectories(find_trajectories(position_model(), images, labels), tmp_path / "trajectories.png", "a title")
    names = ("cosines.png", "ratios.png", "named.svg", "trajectories.png")
    assert min((tmp_path / name).stat().st_size for name in names) > 5000
    with pytest.raises(ValueError, match="classes"):
        draw_alignment(result, tmp_path / "no.png", classes=("one",))
