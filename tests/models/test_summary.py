"""The table of layers: shapes, parameters, multiply-adds."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchcaps
from tests.models.narrow import CAPSULE_MODELS, EVERY, narrow
from torchcaps.profiling.summary import Row, summarize
from torchcaps.routing import EM, Dynamic, InvertedAttention


@EVERY
def test_parameters_add_up_and_the_table_says_so(name: str) -> None:
    model = narrow(name)
    summary = summarize(model)
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    lines = str(summary).splitlines()
    assert lines[0].startswith(f"{name}: {type(model.spec).__name__}(image=")
    assert lines[1].split() == ["layer", "kind", "out", "parameters", "multiply-adds", "votes"]
    assert f"{summary.parameters:,}" in lines[-1]
    assert len(lines) == len(summary.rows) + 3


@pytest.mark.parametrize("name", [name for name in torchcaps.list_models() if name not in CAPSULE_MODELS])
def test_multiply_adds_of_convolutional_nets_are_torchs_own_count(name: str) -> None:
    model = narrow(name).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(1, *model.spec.image))
    assert 2 * summarize(model).multiply_adds == counter.get_total_flops()


def test_multiply_adds_of_capsnet_by_hand() -> None:
    with torch.device("meta"):
        rows = {row.name: row for row in summarize(torchcaps.create_model("sabour2017_mnist")).rows}
    votes = 1152 * 10 * 16
    assert rows["conv1"] == Row("conv1", "conv 9x9", (256, 20, 20), 20_992, 256 * 400 * 81)
    assert rows["primary"].multiply_adds == 256 * 36 * 81 * 256
    assert rows["primary"].output == (6, 6, 32, 8)
    assert rows["digit"].votes == votes
    assert rows["digit"].multiply_adds == votes * 8 + votes * 5  # to make them; three sums and two agreements
    assert rows["decoder"].multiply_adds == 160 * 512 + 512 * 1024 + 1024 * 784


@pytest.mark.parametrize(("routing", "passes"), [(InvertedAttention(3), 5), (EM(2), 8), (Dynamic(1), 1)])
def test_each_reduction_of_the_votes_counts(routing: object, passes: int) -> None:
    """EM: a sum and two multiplications for the squares twice, the distances once."""
    model = narrow("tsai2020_cifar10", routing=routing, schedule="sequential")
    row = next(row for row in summarize(model).rows if row.name == "caps1")
    assert row.multiply_adds == row.votes * (4 + passes)  # 4x4 matrices: four products for each number


def test_multiply_adds_of_attention_by_hand() -> None:
    """Each vote sums up a window of one child channel; attention reads all votes for a parent once for each child."""
    with torch.device("meta"):
        rows = {row.name: row for row in summarize(torchcaps.create_model("choi2019_mnist")).rows}
    places, votes = 14 * 14, 7 * 7 * 8 * 8 * 32
    assert rows["primary"].multiply_adds == places * (128 * 9 * 64 + 8 * 16 * 16)  # and the capsule activation
    assert rows["caps1"].votes == votes
    assert rows["caps1"].multiply_adds == votes * (9 * 16 + 8 + 1)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (2, {"caps1": (1, 1), "caps2": (1, 1), "classes": (1, 3)}),
        (3, {"caps1": (1, 1), "caps2": (1, 3), "classes": (2, 5)}),
    ],
)
def test_votes_count_once_for_each_set_of_children(iterations: int, expected: dict[str, tuple[int, int]]) -> None:
    """Concurrently: how often votes are made anew, and passes over them. Steps that reach no class are not taken."""
    model = narrow("tsai2020_cifar10", routing=InvertedAttention(iterations))
    rows = {row.name: row for row in summarize(model).rows}
    for name, (made, passes) in expected.items():
        assert rows[name].multiply_adds == rows[name].votes * (4 * made + passes), name


def test_the_table_is_that_of_the_model_as_it_is_now() -> None:
    """Also after its owner has changed it, and without copying or moving a weight."""
    model = narrow("sabour2017_mnist")
    before = summarize(model).parameters
    state = copy.deepcopy(model.state_dict())
    model.front.conv1 = nn.Conv2d(1, 16, 9, bias=False)
    assert summarize(model).parameters == before - 16
    model.front.conv1 = nn.Conv2d(1, 16, 9)
    model.load_state_dict(state)
    summarize(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    calls: list[object] = []
    model.register_forward_hook(lambda *passed: calls.append(passed))
    assert "total" in str(summarize(model))
    assert not calls  # hooks are for the owner's own calls


def test_the_table_is_the_same_on_the_meta_device() -> None:
    for name in ("choi2019_mnist", "tsai2020_resnet_cifar10", "hinton2018_smallnorb"):
        assert summarize(narrow(name)) == summarize(narrow(name).to("meta"))
