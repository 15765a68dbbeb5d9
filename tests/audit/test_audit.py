"""The audit finds each known mistake by the check named for it, and passes every model of ours."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.audit.mistakes import MISTAKES, CapsNet, ConvolutionalScramble, ScrambledWindowsNet, WindowedNet
from tests.cli.commands import run_command, usage_error
from tests.contract.cases import CASES, Case, over
from tests.models.narrow import batch, narrow, sample_models
from torchcaps import list_models
from torchcaps.audit import AuditReport, AuditVerdict, Finding, audit
from torchcaps.audit.probe import AuditArgumentError
from torchcaps.cli import main
from torchcaps.nn import ConvCapsules
from torchcaps.routing import EM

OPTIONS = {
    "labels": torch.tensor([3, 1, 4, 5]),
    "permuted": {"digits": {"weight": [0]}},
    "primary": "primary",
    "couplings": lambda module, images: module.digits.couplings(module.encode(images)),
    "coupling_axis": 2,
    "lengths": lambda output: output[0],
}


def images() -> torch.Tensor:
    return torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_correct_network_passes_every_check() -> None:
    report = audit(CapsNet(), images(), **OPTIONS)
    assert report.failures == ()
    checked = {finding.check for finding in report.findings if finding.verdict is AuditVerdict.PASSED}
    assert {check for _, check in MISTAKES.values()} <= checked


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_by_its_check_alone(name: str) -> None:
    network, check = MISTAKES[name]
    report = audit(network(), images(), **OPTIONS)
    assert [finding.check for finding in report.failures] == [check]
    finding = report[check]
    assert isinstance(finding, Finding)
    assert all((finding.tried, finding.result, finding.why))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((4,), 3), "not all be equal"),
        (torch.tensor(3), "one row for each"),
        (torch.arange(3), "one row for each"),
        ([3, 1, 4, 5], "must be a tensor"),
    ],
)
def test_labels_that_prove_nothing_are_rejected(labels: object, message: str) -> None:
    """Exchanging equal labels changes nothing, so that a leak would not be found."""
    network, _ = MISTAKES["labels in evaluation"]
    with pytest.raises(AuditArgumentError, match=message):
        audit(network(), images(), labels=labels)  # type: ignore[arg-type]


def test_lazy_modules_must_be_called_first() -> None:
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(AuditArgumentError, match="lazy"):
        audit(module, images())
    module(images())
    assert audit(module, images()).passed


@pytest.mark.parametrize("correct", [True, False])
def test_scrambled_windows_are_not_equivariant(correct: bool) -> None:
    report = audit(ConvolutionalScramble(correct), torch.randn(2, 8, 8, 3, 4), translated={"": 1})
    expected = AuditVerdict.PASSED if correct else AuditVerdict.FAILED
    assert report["translation_equivariance"].verdict is expected


@pytest.mark.parametrize("network", [WindowedNet, ScrambledWindowsNet])
def test_scrambled_windows_inside_of_a_network(network: type[WindowedNet]) -> None:
    report = audit(network(), images(), **OPTIONS | {"primary": None, "permuted": None}, translated={"windows": 1})
    assert [f.check for f in report.failures] == ([] if network.correct else ["translation_equivariance"])


@pytest.mark.parametrize("name", sample_models(list_models(), 12))
def test_models_pass_what_they_claim(name: str) -> None:
    model = narrow(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = audit(model, batch(model, 3)[0])
    failures = [(finding.check, finding.result) for finding in report.failures]
    if getattr(getattr(model.spec, "routing", None), "approximate", False):  # equal up to the tolerance of its solver
        failures = [failure for failure in failures if failure[0] != "batch_of_one"]
    assert failures == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for finding in report.findings:
        assert finding.verdict is not AuditVerdict.NOT_CLAIMED or finding.result


@over(CASES, n=30)
def test_layers_pass_what_they_claim(case: Case) -> None:
    report = audit(case.layer(dtype=torch.float32), case.children(torch.float32, batch=3).pose)
    assert [(finding.check, finding.result) for finding in report.failures] == []


def test_missing_invariants_are_not_claimed() -> None:
    """Without the declaration the audit would report a failure."""
    layer = ConvCapsules(2, 4, 3, 4, 3, routing=EM(coordinates=True), pose="matrix")
    pose = torch.randn(2, 7, 7, 2, 4)
    finding = audit(layer, pose)["translation_equivariance"]
    assert finding.verdict is AuditVerdict.NOT_CLAIMED
    assert "position" in finding.result
    report = audit(layer, pose, translated={"": 1})
    assert [finding.check for finding in report.failures] == ["translation_equivariance"]


def test_batch_normalisation_in_evaluation_is_accepted_and_own_statistics_are_not() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 26 * 26, 10))
    assert audit(network, images()).passed
    network[1] = nn.BatchNorm2d(2, track_running_stats=False)
    assert "batch_independence" in [finding.check for finding in audit(network, images()).failures]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((lambda x: x, images()), TypeError),
        ((nn.Linear(2, 2), torch.ones(2, 2, dtype=torch.int64)), ValueError),
        ((nn.Linear(2, 2), torch.ones(1, 2)), ValueError),
        ((nn.Linear(2, 2), torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])), ValueError),
    ],
)
def test_invalid_arguments(arguments: tuple, error: type[Exception]) -> None:
    with pytest.raises(error):
        audit(*arguments)


def test_invalid_names() -> None:
    with pytest.raises(ValueError, match="nonexistent"):
        audit(CapsNet(), images(), primary="nonexistent")
    with pytest.raises(ValueError, match="no_check"):
        audit(CapsNet(), images(), unclaimed={"no_check": "reason"})
    with pytest.raises(ValueError, match="labels"):
        audit(CapsNet(), images(), labels=torch.zeros(3))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run_command(capsys, "audit", "capsnet_small", "--json"))
    assert report["passed"] is True
    path = "tests.audit.mistakes.LeakedLabels"
    with pytest.raises(SystemExit) as stop:
        main(["audit", path, "--classes", "10", "--primary", "primary"])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    for part in ("decoder_labels", "failed", "Why it matters"):
        assert part in text
    assert "unknown" in usage_error("audit", "capsnet_smal")
    assert "STRIDE" in usage_error("audit", path, "--translated", "conv")
    assert isinstance(audit(CapsNet(), images()), AuditReport)
