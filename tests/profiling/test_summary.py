"""Layer table: shapes, parameters, multiply-adds, votes and computation paths."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchcaps
from tests.models.narrow import CAPSULE_MODELS, EVERY, narrow
from torchcaps.profiling.summary import LayerRow, ModelSummary, layer_paths, summarize
from torchcaps.routing import EM, Dynamic, InvertedAttention
from torchcaps.votes.dispatch import VotePath


@EVERY
def test_parameters_add_up(name: str) -> None:
    model = narrow(name)
    summary = summarize(model)
    assert type(summary) is ModelSummary
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    lines = str(summary).splitlines()
    assert lines[0].startswith(f"{name}: {type(model.spec).__name__}(image=")
    assert lines[1].split() == ["layer", "kind", "out", "parameters", "multiply-adds", "votes"]
    assert f"{summary.parameters:,}" in lines[-1]
    assert len(lines) == len(summary.rows) + 3


@pytest.mark.parametrize("name", [name for name in torchcaps.list_models() if name not in CAPSULE_MODELS])
def test_multiply_adds_of_convolutional_networks_equal_torchs_count(name: str) -> None:
    model = narrow(name).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(1, *model.spec.image))
    assert 2 * summarize(model).multiply_adds == counter.get_total_flops()


def test_multiply_adds_of_capsnet_by_hand() -> None:
    with torch.device("meta"):
        rows = {row.name: row for row in summarize(torchcaps.create_model("sabour2017_mnist")).rows}
    votes = 1152 * 10 * 16
    assert rows["conv1"] == LayerRow("conv1", "conv 9x9", (256, 20, 20), 20_992, 256 * 400 * 81)
    assert rows["primary"].multiply_adds == 256 * 36 * 81 * 256
    assert rows["primary"].output == (6, 6, 32, 8)
    assert rows["digit"].votes == votes
    assert rows["digit"].multiply_adds == votes * 8 + votes * 5  # transform; three sums and two agreements
    assert rows["decoder"].multiply_adds == 160 * 512 + 512 * 1024 + 1024 * 784


@pytest.mark.parametrize(("routing", "passes"), [(InvertedAttention(3), 5), (EM(2), 8), (Dynamic(1), 1)])
def test_multiply_adds_of_reductions(routing: object, passes: int) -> None:
    """EM: ``sum`` (1) and ``sqsum`` (2) twice, ``sqdist`` (2) once."""
    model = narrow("tsai2020_cifar10", routing=routing, schedule="sequential")
    row = next(row for row in summarize(model).rows if row.name == "caps1")
    assert row.multiply_adds == row.votes * (4 + passes)  # 4x4 matrices: four products per element


def test_multiply_adds_of_attention_by_hand() -> None:
    """A vote is a sum over a window of one child type; attention reads all votes for a parent once per child."""
    with torch.device("meta"):
        rows = {row.name: row for row in summarize(torchcaps.create_model("choi2019_mnist")).rows}
    positions, votes = 14 * 14, 7 * 7 * 8 * 8 * 32
    assert rows["primary"].multiply_adds == positions * (128 * 9 * 64 + 8 * 16 * 16)  # and the capsule activation
    assert rows["caps1"].votes == votes
    assert rows["caps1"].multiply_adds == votes * (9 * 16 + 8 + 1)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (2, {"caps1": (1, 1), "caps2": (1, 1), "classes": (1, 3)}),
        (3, {"caps1": (1, 1), "caps2": (1, 3), "classes": (2, 5)}),
    ],
)
def test_votes_are_counted_once_per_set_of_children(iterations: int, expected: dict[str, tuple[int, int]]) -> None:
    """Concurrent schedule: number of transforms and of reductions. Steps that do not reach the top are skipped."""
    model = narrow("tsai2020_cifar10", routing=InvertedAttention(iterations))
    rows = {row.name: row for row in summarize(model).rows}
    for name, (transforms, reductions) in expected.items():
        assert rows[name].multiply_adds == rows[name].votes * (4 * transforms + reductions), name


def test_table_follows_changes_and_leaves_the_model_unchanged() -> None:
    model = narrow("sabour2017_mnist")
    before = summarize(model).parameters
    state = copy.deepcopy(model.state_dict())
    model.front.conv1 = nn.Conv2d(1, 16, 9, bias=False)
    assert summarize(model).parameters == before - 16
    model.front.conv1 = nn.Conv2d(1, 16, 9)
    model.load_state_dict(state)
    summarize(model)
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert model.training
    assert [name for name, module in model.named_modules() if module._forward_hooks] == []
    assert model.capsules.layers["digit"].votes_factory is None
    calls: list[object] = []
    model.register_forward_hook(lambda *passed: calls.append(passed))
    assert "total" in str(summarize(model))
    assert calls == []  # the user's hooks are not called


def test_table_is_equal_on_the_meta_device() -> None:
    for name in ("choi2019_mnist", "tsai2020_resnet_cifar10", "hinton2018_smallnorb"):
        assert summarize(narrow(name)) == summarize(narrow(name).to("meta"))


def test_layer_paths_follow_the_batch_size_and_the_option() -> None:
    with torch.device("meta"):
        model = torchcaps.create_model("sabour2017_mnist")
    summary = summarize(model)
    assert layer_paths(model, summary, batch_size=1) == {"digit": VotePath.STORED}  # 0.7 MiB, one lane
    assert layer_paths(model, summary, batch_size=512)["digit"].is_streamed  # 360 MiB
    model.capsules.layers["digit"].streamed = False
    assert layer_paths(model, summary, batch_size=512) == {"digit": VotePath.STORED}
