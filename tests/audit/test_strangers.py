"""Modules that do not follow the conventions of torchcaps: a correct verdict, or one sentence, never a traceback."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.commands import usage_error
from torchcaps.audit import AuditVerdict, audit

IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0])
ONE_HOT = nn.functional.one_hot(LABELS, 3)


class Correct(nn.Module):
    """Correct, with a submodule that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 2, 2)
        self.head = nn.Linear(18, 3)

    def scores(self, images: Tensor) -> Tensor:
        return self.head(self.features(input=images).flatten(1)).sigmoid()

    def forward(self, images: Tensor) -> Any:
        return self.scores(images)


class OverwritesImages(Correct):
    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images.mul_(0.5))


class NeedsLabels(Correct):
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.scores(images) + 0 * labels.sum()


class OneHotLabels(Correct):
    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        scores = self.scores(images)
        return scores * labels[:, :3] if self.training and labels is not None else scores


class Frozen(Correct):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class LosesGradients(Correct):
    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images)


class AlwaysNaN(Correct):
    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images) * torch.nan


class FailsInTraining(Correct):
    def forward(self, images: Tensor) -> Tensor:
        return self.scores(images)["key"] if self.training else self.scores(images)


class RejectsTraining(Correct):
    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            raise ValueError("labels are required in training mode")
        return self.scores(images)


class OtherOutput(Correct):
    """Predicted classes, an array, or one column per image: nothing that the checks could examine."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, images: Tensor) -> Any:
        scores = self.scores(images)
        return {"classes": scores.argmax(1), "array": scores.detach().numpy(), "columns": scores.T}[self.kind]


class CanNotBeCopied(Correct):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = 2 * self.head.weight


@pytest.mark.parametrize(
    ("network", "labels", "failures"),
    [
        (Correct(), None, []),
        (OverwritesImages(), None, []),
        (NeedsLabels(), LABELS, []),
        (OneHotLabels(), ONE_HOT, []),
        (Frozen(), None, []),
        (LosesGradients(), None, ["parameter_gradients"]),
        (AlwaysNaN(), None, ["finite_values", "parameter_gradients"]),  # and not "random outputs"
        (FailsInTraining(), None, ["parameter_gradients"]),
        (RejectsTraining(), None, ["parameter_gradients"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_verdicts(network: nn.Module, labels: Tensor | None, failures: list[str]) -> None:
    report = audit(network, IMAGES, labels=labels)
    assert [finding.check for finding in report.failures] == failures


@pytest.mark.parametrize(
    ("network", "arguments", "match"),
    [
        (OtherOutput("classes"), {}, "int64"),
        (OtherOutput("array"), {}, "ndarray"),
        (OtherOutput("columns"), {}, r"\[3, 4\]"),
        (CanNotBeCopied(), {}, "copied"),
        (NeedsLabels(), {}, "labels="),
        (OneHotLabels(), {"labels": LABELS}, "labels"),
        (Correct(), {"permuted": {"head": {}}}, "permuted"),
        (nn.Flatten(2), {"permuted": {"": {"weight": [0]}}}, "weight"),
        (nn.Linear(4, 4), {"permuted": {"": {"weight": [2]}}}, "axes"),
        (Correct(), {"translated": {"head": 1}}, "translated"),
        (Correct(), {"translated": {"features": 0}}, "stride"),
        (Correct(), {"primary": "head"}, "primary"),
        (Correct(), {"couplings": lambda network, images: []}, "couplings"),
        (Correct(), {"couplings": lambda network, images: 5}, "couplings must return tensors .* got int"),
        (Correct(), {"couplings": lambda network, images: images, "coupling_axis": 4}, "coupling_axis"),
        (Correct(), {"couplings": lambda network, images: network.missing}, "couplings"),
        (Correct(), {"lengths": lambda output: output["lengths"]}, "lengths"),
        (Correct(), {"lengths": lambda output: 1.0}, "lengths"),
    ],
)
def test_unsuitable_arguments_are_one_sentence(network: nn.Module, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as raised:
        audit(network, IMAGES, **arguments)
    assert "\n" not in str(raised.value)


def test_layers_called_by_keyword_are_examined() -> None:
    report = audit(Correct(), IMAGES, translated={"features": 1})
    assert report["translation_equivariance"].verdict is AuditVerdict.PASSED


def test_grid_without_room_for_a_shift_is_not_checked() -> None:
    report = audit(nn.Conv2d(1, 2, 1), torch.rand(2, 1, 2, 2), translated={"": 1})
    assert report["translation_equivariance"].verdict is AuditVerdict.NOT_CHECKED


def test_module_that_exits_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_that_exits.py").write_text("raise SystemExit(2)")
    monkeypatch.chdir(tmp_path)
    assert "__main__" in usage_error("audit", "script_that_exits.CapsNet")


def constructor_fails() -> nn.Module:
    """A factory that fails."""
    raise RuntimeError("no weights\nsecond line")


@pytest.mark.parametrize("name", ["constructor_fails", "OtherOutput", "IMAGES.missing", "ONE_HOT", "NeedsLabels"])
def test_command(name: str) -> None:
    usage_error("audit", f"tests.audit.test_strangers.{name}", "--image", "1,4,4")
