"""Capsule networks of others: correct ones pass, whatever the order of their axes, and one fault is one failure."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.audit import foreign
from tests.cli.commands import run_command, usage_error
from torchcaps.audit import AuditVerdict, audit
from torchcaps.nn import ConvCapsules


def examine_units_first(network: nn.Module) -> Any:
    """Audit a `UnitsFirst` with all checks that it can provide."""
    return audit(
        network,
        torch.rand(4, 1, 15, 15, generator=torch.Generator().manual_seed(0)),
        labels=torch.eye(10)[[3, 1, 4, 5]],
        permuted={"digits": {"W": [1]}},
        translated={"conv": 1},
        primary="primary",
        couplings=lambda network, images: (network(images), network.digits.couplings)[1],
        coupling_axis=2,
        lengths=lambda output: output[0],
    )


def examine_channels_last(network: nn.Module) -> Any:
    """Audit a `ChannelsLast` with all checks that it can provide."""
    return audit(
        network,
        torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)),
        translated={"primary_caps": 1, "conv_caps": 1},
        primary="primary_caps",
        lengths=lambda output: output,
    )


@pytest.mark.parametrize(
    ("network", "failures"),
    [
        (foreign.UnitsFirst, []),
        (foreign.AcrossPositions, ["primary_positions"]),
        (foreign.KeepsLogits, ["determinism"]),
        (foreign.LabelledLengths, ["decoder_labels"]),
        (foreign.UsesAnyLabels, ["decoder_labels"]),
    ],
)
def test_units_first(network: type[nn.Module], failures: list[str]) -> None:
    torch.manual_seed(0)
    report = examine_units_first(network())
    assert [(f.check, f.result) for f in report.failures if f.check not in failures] == []
    assert [finding.check for finding in report.failures] == failures
    if not failures:
        assert {finding.verdict for finding in report.findings} == {AuditVerdict.PASSED}


@pytest.mark.parametrize(
    ("network", "failures"), [(foreign.ChannelsLast, []), (foreign.Transposed, ["translation_equivariance"])]
)
def test_channels_last(network: type[nn.Module], failures: list[str]) -> None:
    torch.manual_seed(0)
    report = examine_channels_last(network())
    assert [(f.check, f.result) for f in report.failures if f.check not in failures] == []
    assert [finding.check for finding in report.failures] == failures


@pytest.mark.parametrize(
    ("layer", "is_correct"),
    [
        (nn.Conv2d(2, 16, 3, dilation=2), True),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 16, 3, 2)), True),
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.AvgPool2d(2)), True),
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.InstanceNorm2d(16)), True),
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.Flatten(2)), True),  # [B, C, positions]
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.Unflatten(1, (2, 8))), True),  # [B, types, dim, H, W]
        (nn.Unfold(3), True),
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.Flatten(), nn.Unflatten(1, (-1, 8))), False),
        (nn.Sequential(nn.Conv2d(2, 16, 3), nn.Flatten(), nn.Unflatten(1, (2, 7, 8, 8))), False),
    ],
    ids=str,
)
def test_window_of_a_primary_layer(layer: nn.Module, is_correct: bool) -> None:
    torch.manual_seed(0)
    report = audit(layer, torch.rand(2, 2, 9, 10), primary="")
    expected = AuditVerdict.PASSED if is_correct else AuditVerdict.FAILED
    assert report["primary_positions"].verdict is expected, report["primary_positions"].result


@pytest.mark.parametrize("routing", ["dynamic", "variational_bayes"])
@pytest.mark.parametrize("stride", [1, (2, 1)])
def test_own_convolutional_layers_at_real_sizes(routing: str, stride: Any) -> None:
    torch.manual_seed(0)
    layer = ConvCapsules(2, 4, 3, 4, 3, stride=stride, routing=routing, pose="matrix").eval()
    assert audit(layer, torch.randn(2, 11, 11, 2, 4)).failures == ()


def test_command_line_takes_axes_of_children_and_one_hot_labels(capsys: pytest.CaptureFixture[str]) -> None:
    target = ("tests.audit.foreign.UnitsFirst", "--image", "1,15,15")
    arguments = (*target, "--classes", "10", "--one-hot", "--permuted", "digits:W=1", "--json")
    report = json.loads(run_command(capsys, "audit", *arguments))
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["permutation_invariance"] == verdicts["decoder_labels"] == "passed"
    assert "--classes" in usage_error("audit", *target, "--one-hot")
    assert "AXIS" in usage_error("audit", *target, "--permuted", "digits:W")
    assert "W" in usage_error("audit", *target, "--permuted", "digits:V=1")
