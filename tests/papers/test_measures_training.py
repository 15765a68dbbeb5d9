"""What is read off weights and curves: signs of coefficients, the first steps of training, networks together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.models.narrow import narrow
from tests.papers.nets import as_trained, knowing
from tests.tolerances import SAME
from torchcaps.data import ImageSet
from torchcaps.models import Network
from torchcaps.papers.measures.training import coefficient_signs, early_training, ensemble
from torchcaps.reproduce.context import Context
from torchcaps.routing import Quadratic

CLOSE = SAME[torch.float32]


def quadratic_layer(model: nn.Module) -> Any:
    (layer,) = (layer for layer in model.modules() if isinstance(getattr(layer, "routing", None), Quadratic))
    return layer


def test_coefficients_are_counted_by_sign_and_size() -> None:
    """Of every ten three are below zero, two are zero, and one is less than a hundredth of the mean size, 1."""
    model = narrow("yang2021_mnist")
    values = quadratic_layer(model).coefficients["coefficient"]
    ten = torch.tensor([-4.0, -0.005, -0.5, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.995])
    values.copy_(ten.repeat(values.numel() // 10).view_as(values))
    found = coefficient_signs(Context("smoke", 0, Path("none")), as_trained(model, "yang2021_mnist"))
    assert found["negative"] == pytest.approx(30, rel=CLOSE)
    assert found["near_zero"] == pytest.approx(30, rel=CLOSE)
    assert found["mean"] == pytest.approx(0.099, rel=CLOSE)
    assert found["largest"] == 4


def test_the_first_steps_of_training_are_counted_step_by_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against what the networks were seen to say; every ascent turns one more hundredth of the coefficients round."""
    wrong: dict[str, list[float]] = {}
    ascents: list[str] = []

    def listen(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, Network) and len(inputs) == 2:
            routing = getattr(module.spec, "algorithm", None)
            name = routing.penalty if isinstance(routing, Quadratic) else "dynamic"
            told = output.scores.argmax(1).tolist()
            wrong.setdefault(name, []).append(sum(a != b for a, b in zip(told, inputs[1].tolist(), strict=True)) / 8)

    def ascend(module: Any, images: Tensor, labels: Tensor) -> None:
        ascents.append(module.spec.effective_routing.penalty)
        values = quadratic_layer(module).coefficients["coefficient"]
        turned = values.numel() * ascents.count(ascents[-1]) // 100
        values.view(-1)[:turned] = -values.view(-1)[:turned].abs()

    monkeypatch.setattr(Quadratic, "ascend", staticmethod(ascend))
    handle = register_module_forward_hook(listen)
    found = early_training(Context("smoke", 0, tmp_path), "yang2021_mnist", {}, steps=16, every=2, batch=8)
    handle.remove()
    assert found["steps"].tolist() == [2, 4, 6, 8, 10, 12, 14, 16]
    assert {name: len(shares) for name, shares in wrong.items()} == {"dynamic": 16, "l2": 16, "l1": 16}
    for name, shares in wrong.items():
        windows = [50 * (shares[k] + shares[k + 1]) for k in range(0, 16, 2)]
        assert found[f"{name} wrong"].tolist() == pytest.approx(windows, rel=CLOSE)
        assert found[f"{name} first"] == pytest.approx((windows[0] + windows[1]) / 2, rel=CLOSE), "of eight, two"
        assert len(set(windows)) > 2
    size = 10 * 144  # coefficients: ten classes, 4 types at 6x6 places
    turned = [100 * (size * steps // 100) / size for steps in (2, 4, 6, 8, 10, 12, 14, 16)]
    for name in ("l2", "l1"):
        assert found[f"{name} negative"].tolist() == pytest.approx(turned, rel=CLOSE)
        assert found[f"{name} negative_last"] == pytest.approx(turned[-1], rel=CLOSE)
    assert found["dynamic negative"].tolist() == [0] * 8


class Digits(Context):
    """Five images, whatever is asked for."""

    def dataset(self, name: str, split: str = "test", n: int | None = None, **options: Any) -> ImageSet:
        assert (name, split) == ("mnist", "test")
        images = (100 * torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))).byte()
        return ImageSet(name, split, images[:n], torch.arange(5)[:n], tuple("0123456789"))


def test_networks_together_add_up_their_scores() -> None:
    """Two are a little for the next class, one is much for the right one: right together, wrong by votes.

    But for image 3, where the one is for the next class as well, and image 4, where it is not sure enough.
    """
    context = Digits("smoke", 0, Path("none"))
    data = context.dataset("mnist")
    images, right = data.images.float() / 255, F.one_hot(torch.arange(5), 10)
    hesitant = 0.1 * F.one_hot(torch.arange(1, 6), 10).float()
    sure = torch.tensor([0.9, 0.9, 0.9, 0.0, 0.1])[:, None] * right
    sure[3, 4] = 0.9
    nets = [knowing("sabour2017_cnn_mnist", images, scores) for scores in (hesitant, hesitant, sure)]
    found = ensemble(context, nets, "mnist")
    assert found["accuracy"] == pytest.approx(60, rel=CLOSE)
    assert found["error"] == pytest.approx(40, rel=CLOSE)
    assert (found["members"], found["accuracy_images"], found["error_images"]) == (3, 5, 5)
    assert ensemble(context, nets[:2], "mnist", images=4)["accuracy"] == 0
