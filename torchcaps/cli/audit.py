"""``torchcaps audit``."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.registry import import_object, is_import_path
from torchcaps.audit import AuditReport, AuditVerdict, audit
from torchcaps.audit.probe import one_line
from torchcaps.cli.command_line import CommandLine, append_working_directory
from torchcaps.cli.console import ExitCode, print_table, print_text, start_table
from torchcaps.cli.options import add_trust_flag, load_runs
from torchcaps.cli.parser import Parser
from torchcaps.data import Batch
from torchcaps.models import Network, create_model
from torchcaps.training.inference import TrainedRun
from torchcaps.training.prediction import open_run_test_set
from torchcaps.training.settings_file import may_download

__all__ = ["audit_command"]

N_IMAGES = 4
DESCRIPTION = (
    "Examine a capsule network for known mistakes, by its behaviour: outputs that depend on the rest of the batch, NaN "
    "at zero, softmax over the wrong axis, scrambled poses, primary capsules across positions, labels that leak into "
    "evaluation, and others. The argument is a run directory, the name of a model, or the import path of any "
    "torch.nn.Module: a class or function without arguments, or an instance. The exit code is 1 if a check fails."
)
EXAMPLES = (
    "torchcaps audit runs/capsnet_digits-digits-1",
    "torchcaps audit my_module.CapsNet --image 1,28,28 --primary primary_capsules --classes 10",
    "torchcaps audit my_module.CapsNet --classes 10 --one-hot --permuted digit_capsules:weight=0",
    "torchcaps audit tsai2020_cifar10 --json",
)


def audit_command(arguments: list[str]) -> None:
    """Audit a run, a model or any module."""
    line = CommandLine.split(arguments, ("--one-hot",))
    parser = Parser("torchcaps audit", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("target", help="run directory, name of a model, or import path of a module")
    text = "shape of the images of a module given by import path: channels, height, width"
    parser.add_argument("--image", type=tuple[int, int, int], default=(1, 28, 28), help=text)
    text = "number of classes of a module given by import path, if it is called with labels in training"
    parser.add_argument("--classes", type=int | None, help=text)
    parser.add_argument("--one-hot", type=bool, default=False, help="with --classes: pass labels as one-hot rows")
    text = "name of the primary capsule layer, as in named_modules()"
    parser.add_argument("--primary", type=str | None, help=text)
    text = (
        "name of a layer that must not depend on the order of its children, and the axis of children of its parameter, "
        "if it has one, as in digits:weight=0"
    )
    parser.add_argument("--permuted", type=str | None, help=text)
    text = "name and stride of a convolutional layer, as in caps1=2"
    parser.add_argument("--translated", type=str | None, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random images and of a new model's weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust_flag(parser)
    options, _ = parser.parse(line)
    if options.one_hot and options.classes is None:
        parser.error("--one-hot needs --classes, the number of columns")
    torch.manual_seed(options.seed)
    module, images, labels = _load(options)
    named: dict[str, Any] = {"primary": options.primary, "labels": labels}
    if options.permuted is not None:
        name, has_parameter, parameter = options.permuted.partition(":")
        key, _, axis = parameter.partition("=")
        if has_parameter and not (key and axis.isdigit()):
            parser.error(f"--permuted must be NAME or NAME:PARAMETER=AXIS, got {options.permuted!r}")
        named["permuted"] = {name: {key: [int(axis)]} if has_parameter else {}}
    if options.translated is not None:
        name, _, stride = options.translated.partition("=")
        if not stride.isdigit() or not int(stride):
            parser.error(f"--translated must be NAME=STRIDE, got {options.translated!r}")
        named["translated"] = {name: int(stride)}
    report = audit(module, images, **named)
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    if not report.passed:
        sys.exit(ExitCode.FAILURE)


def _load(options: Any) -> tuple[nn.Module, Tensor, Tensor | None]:
    """Return the module, example images, and labels, if it takes them and does not know them itself."""
    target = options.target
    if Path(target).expanduser().is_dir():
        (run,) = load_runs([target], options)
        return run.model, _test_images(run), None
    if not is_import_path(target):
        model = create_model(target)
        return model, torch.rand(N_IMAGES, *model.spec.image), None
    append_working_directory([target])
    module = _import_module(target)
    if isinstance(module, Network):
        return module, torch.rand(N_IMAGES, *module.spec.image), None
    labels = None if options.classes is None else torch.arange(N_IMAGES) % options.classes
    if options.classes is not None and options.one_hot:
        labels = torch.eye(options.classes)[torch.arange(N_IMAGES) % options.classes]
    return module, torch.rand(N_IMAGES, *options.image), labels


def _import_module(target: str) -> nn.Module:
    """Return the module at an import path, or the one that the class or function there returns."""
    try:
        module = import_object(target)
    except SystemExit as error:
        name = target.rpartition(".")[0]
        raise ValueError(f"{name} exits when it is imported: call its main() only if __name__ == '__main__'") from error
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{target} can't be imported: {one_line(error)}") from error
    if isinstance(module, nn.Module):
        return module
    if not callable(module):
        raise ValueError(f"{target} must be a torch.nn.Module, or a class or function that returns one")
    try:
        module = module()
    except Exception as error:
        raise ValueError(f"{target} must work without arguments: {one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{target} must return a torch.nn.Module, got {type(module).__name__}")
    return module


def _test_images(run: TrainedRun) -> Tensor:
    """Return preprocessed images of the run's test set; random ones if it has none."""
    dataset = open_run_test_set(run, may_download(run.spec.data_dir))
    if dataset is None:
        return torch.rand(N_IMAGES, *run.model.spec.image)
    batch: Batch = next(iter(run.loader(dataset).epoch(0)))
    return batch.images[:N_IMAGES]


def _print(report: AuditReport) -> None:
    """Print the table of checks, the details of failed ones, and the number of each verdict."""
    table = start_table("check", "verdict", "result")
    for finding in report.findings:
        table.add_row(finding.check, finding.verdict.value, finding.result)
    print_table(table)
    for finding in report.failures:
        print_text(f"{finding.check}: {finding.tried}; {finding.result}. Why it matters: {finding.why}.")
    counts = {verdict: sum(f.verdict is verdict for f in report.findings) for verdict in AuditVerdict}
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count))
