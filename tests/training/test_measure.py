"""What is counted: accuracies as the papers count them, intervals, ensembles' parts; and the figures."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import torchcaps
from tests.training.helpers import small_spec as small
from torchcaps.data import Loader, create_dataset
from torchcaps.metrics import exact_set_match, top_k_set_match, wilson_interval
from torchcaps.training import train
from torchcaps.training.evaluation import RunningEvaluation, evaluate


def test_wilsons_interval_holds_at_the_ends() -> None:
    """Against the published example of Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson_interval(right, n)
        assert found == pytest.approx((low, high), abs=1e-4)
    assert wilson_interval(20, 20)[1] == 1
    assert wilson_interval(0, 0) == (0, 1)


def test_one_object_is_counted_by_class_and_by_mistake() -> None:
    model = torchcaps.create_model("capsnet_small", classes=3)
    tally = RunningEvaluation(model)
    scores = torch.tensor([[0.9, 0.1, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.2], [0.1, 0.2, 0.3]])
    tally.add(scores[:3], torch.tensor([0, 1, 2]), 2.0)
    tally.add(scores[3:], torch.tensor([2]), 6.0)
    found = tally.measures()
    assert (found.n, found.n_right, found.loss) == (4, 3, 3.0)  # the loss is weighed by images
    assert found.seen == [1, 1, 2]
    assert found.found == [1, 1, 1]
    assert found.confusion == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    again = RunningEvaluation(model)
    again.restore(tally.plain())
    assert again.measures() == found


def test_several_objects_are_right_as_a_set() -> None:
    torch.manual_seed(0)
    two = torchcaps.create_model("sabour2017_multimnist", classes=4)
    labels = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]])
    scores = torch.rand(4, 4)
    tally = RunningEvaluation(two)
    tally.add(scores, labels, 0.0)
    hot = torch.nn.functional.one_hot(labels, 4).amax(1)
    assert tally.measures().n_right == int(top_k_set_match(scores, hot, 2).sum())
    assert tally.measures().seen == hot.sum(0).tolist()
    assert tally.measures().confusion == []
    with torch.device("meta"):
        free = torchcaps.create_model("tsai2020_diverse_vector", classes=4)
    logits = torch.randn(50, 4)
    there = (torch.rand(50, 4) < 0.5).float()
    there[:20] = (logits[:20] > 0).float()
    tally = RunningEvaluation(free)
    tally.add(logits, there, 0.0)
    assert tally.measures().n_right == int(exact_set_match(logits.sigmoid(), there).sum()) >= 20
    assert tally.measures().found == ((logits > 0) & (there > 0)).sum(0).tolist()


def test_a_look_changes_nothing() -> None:
    model = torchcaps.create_model("choi2019_mnist", width=4, types=2, primary_dim=4, dim=4, hidden=(8,))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chance = torch.get_rng_state()
    loader = Loader(create_dataset("digits", "test").subset(range(20)), 8)
    first = evaluate(model, loader, model.loss())
    assert first == evaluate(model, loader, model.loss())  # dropout is off
    assert first.n == 20
    assert model.training
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("kind", ["digits", "without a decoder", "two objects"])
def test_a_run_draws_what_there_is_to_see(kind: str, tmp_path: Path) -> None:
    spec = {
        "digits": small(val_fraction=0.2),
        "without a decoder": small(reconstruction=False),
        "two objects": small(
            data="multimnist",
            data_options={"source": "digits"},
            n_objects=2,
            image=(1, 36, 36),
            steps=2,
            max_test_images=40,
        ),
    }[kind]
    train(spec, tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run/figures").iterdir())
    wanted = {
        "digits": ["confusion.png", "curves.png", "perturbation.png", "predictions.png"],
        "without a decoder": ["confusion.png", "curves.png", "predictions.png"],
        "two objects": ["curves.png", "predictions.png"],
    }
    assert names == wanted[kind]
    for name in names:
        with Image.open(tmp_path / "run/figures" / name) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("L").resize((64, 64)).getcolors(4096)) > 10  # something is on it
