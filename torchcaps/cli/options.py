"""Flags shared by the commands that use trained runs: weights, CPU threads, and the images to use."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps._core.files import check_inside, reason_of
from torchcaps._core.validation import join_quoted
from torchcaps.cli.command_line import (
    TRUST_FLAG,
    CommandLine,
    append_working_directory,
    flag_of,
    search_working_directory,
)
from torchcaps.cli.parser import Parser, annotation_of, field_help
from torchcaps.data import Dataset
from torchcaps.data.registry import create_dataset, find_spec, is_image_folder, names_image_folder
from torchcaps.training.distributed import check_device, find_device
from torchcaps.training.inference import TrainedRun, load_run
from torchcaps.training.prediction import open_run_test_set, unprocessed_shape
from torchcaps.training.settings_file import may_download
from torchcaps.training.setup import folder_options, is_other_folder, open_folder

__all__ = [
    "ON_ERROR_HELP",
    "OnError",
    "add_data_flags",
    "add_device_flag",
    "add_run_flags",
    "add_trust_flag",
    "add_weights_flag",
    "check_positive",
    "load_runs",
    "names_own_data",
    "open_dataset",
    "output_path",
    "set_num_threads",
]

OnError = Literal["skip", "fail"]
Device = Literal["auto", "cpu", "cuda", "mps"]
ON_ERROR_HELP = "action for image files that can't be read: skip them with a warning (the default), or fail"


def add_run_flags(parser: Parser, num_threads: str = "one per core") -> None:
    """Add ``--weights``, ``--num-threads`` (default as given, for the help), ``--json`` and ``--trust-remote-code``."""
    add_weights_flag(parser)
    parser.add_argument("--num-threads", type=int | None, help=f"number of CPU threads (default: {num_threads})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust_flag(parser)


def add_weights_flag(parser: Parser) -> None:
    """Add ``--weights``."""
    weights = Literal["last", "best", "ema"] | None
    parser.add_argument("--weights", type=weights, help="weights to load (default: eval_weights of the run's recipe)")


def add_device_flag(parser: Parser, default: Device = "auto") -> None:
    """Add ``--device``, which `load_runs` uses."""
    text = "device of the network; 'auto' uses CUDA or MPS if available, otherwise the CPU"
    parser.add_argument("--device", type=Device, default=default, help=text)


def add_trust_flag(parser: Any) -> None:
    """Add ``--trust-remote-code`` to a parser or group of flags."""
    text = (
        "import models, data sets, routings and schedules that a run directory or file of settings names and that are "
        "not registered, which executes their code"
    )
    parser.add_argument(TRUST_FLAG, action="store_true", help=text)


def add_data_flags(parser: Parser, line: CommandLine) -> None:
    """Add ``--data``, ``--split`` and ``--data-dir``, and the fields of the data set that the command line names."""
    text = "other data set than the run's: name (see 'torchcaps data list'), directory of images, or import path"
    parser.add_argument("--data", type=str | None, help=text)
    text = "split of the data set; all images of a directory: all (default: test; all of a directory without splits)"
    parser.add_argument("--split", type=str | None, help=text)
    parser.add_argument("--on-error", type=OnError | None, help=ON_ERROR_HELP)
    text = "directory of downloaded data sets (default: that of the run, otherwise TORCHCAPS_DATA)"
    parser.add_argument("--data-dir", type=str | None, help=text)
    name = line.get("--data")
    append_working_directory([name])
    spec = None if name is None else find_spec("folder" if is_image_folder(name) else name)
    for field in dataclasses.fields(spec) if spec is not None else ():
        text = f"{field_help(type(spec), field.name)} (default: {getattr(spec, field.name)})"
        flag, dest = f"--data.{flag_of(field.name)[2:]}", f"data_options.{field.name}"
        parser.add_argument(flag, dest=dest, type=annotation_of(spec, field.name) | None, help=text)


def check_positive(parser: Parser, options: Any, *names: str) -> None:
    """Exit if an option is given and below 1."""
    for name in names:
        if options[name] is not None and options[name] < 1:
            parser.error(f"{flag_of(name)} must be at least 1, got {options[name]}")


def set_num_threads(options: Any) -> None:
    """Set the number of CPU threads to ``--num-threads``, if given."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)


def load_runs(paths: list[str], options: Any, weights: str | None = None) -> list[TrainedRun]:
    """Load runs and ONNX files; with ``--trust-remote-code`` also runs that name code in the current directory.

    Args:
        paths: run directories, and files with the suffix ``.onnx``.
        options: parsed flags of `add_run_flags` and, if the command has it, of `add_device_flag`.
        weights: as for `torchcaps.training.load_run`.
    """
    check_device(options.get("device") or "cpu")  # before anything is read
    if options.trust_remote_code:
        search_working_directory()
    return [_load(path, options, weights) for path in paths]


def _load(path: str, options: Any, weights: str | None) -> TrainedRun:
    """Load a run directory or an exported file."""
    if Path(path).suffix != ".onnx" or Path(path).is_dir():
        device = find_device(options.get("device") or "cpu")
        return load_run(path, weights, device=device, trust_remote_code=options.trust_remote_code)
    if options.get("device") not in (None, "auto", "cpu"):
        raise ValueError(f"--device {options.device} applies to run directories; {path} runs on the CPU")
    if weights is not None:
        raise ValueError(f"--weights applies to run directories; {path} contains one set of weights")
    from torchcaps.export import load_onnx  # not at the top: few commands need it

    return load_onnx(path, options.num_threads)


def output_path(directory: Path, name: str) -> Path:
    """Return a path in a run directory for the output of a command.

    Raises:
        ValueError: it is a symbolic link out of the directory, through which a stranger's run could replace any file.
    """
    out = directory / name
    try:
        check_inside(out, directory)
    except OSError as error:
        raise ValueError(f"{out} must not be written: it is {reason_of(error)}; choose a path with --out") from error
    return out


def names_own_data(run: TrainedRun, name: str | None) -> bool:
    """Return whether ``--data`` is not given or names the training data of a run."""
    own = run.spec.recipe.data
    return name in (None, own) or (is_image_folder(name) and not is_other_folder(name, own))


def open_dataset(run: TrainedRun, options: Any, split: str | None = None) -> Dataset:
    """Return the data set of ``--data`` and ``--split``; by default the test set of a run.

    A directory of images other than the run's is read in the image format and with the classes of the run. All of its
    images are used if it has no split directories and ``--split`` is not given.

    Args:
        run: the trained run.
        options: parsed flags of `add_data_flags`.
        split: overrides ``--split``.
    """
    spec = run.spec
    download = options.data_dir is not None or may_download(spec.data_dir)
    if options.data_dir is not None:
        spec = dataclasses.replace(spec, data_dir=options.data_dir)
    name = options.data or spec.recipe.data
    given = {k: v for k, v in dict(options.get("data_options") or {}).items() if v is not None}
    fields = {**spec.data_options, **given} if names_own_data(run, options.data) else given
    if options.on_error is not None:
        tested = (options.data is None and options.split in (None, "test") and spec.recipe.test_data) or name
        if not names_image_folder(tested):
            raise ValueError(
                f"--on-error applies to directories of images, and the data set is {tested!r}: leave it out"
            )
        fields["on_error"] = options.on_error
        spec = dataclasses.replace(spec, test_options={**spec.test_options, "on_error": options.on_error})
    if not name:
        raise ValueError(f"{run.path} does not name its data set: choose one with --data")
    if options.split is not None:
        splits = find_spec("folder" if is_image_folder(name) else name).splits
        if options.split not in splits:
            raise ValueError(f"--split of {name} must be {join_quoted(splits)}, got {options.split!r}")
    split = split or options.split
    if options.data is None and split in (None, "test"):
        spec = spec if spec.recipe.test_data else dataclasses.replace(spec, data_options=fields)
        dataset = open_run_test_set(dataclasses.replace(run, spec=spec), download)
        if dataset is None:
            raise ValueError(f"{run.path} has no test set: choose a data set with --data")
        return dataset
    if is_other_folder(name, spec.recipe.data):
        return open_folder(name, split, {**folder_options(spec, unprocessed_shape(run), run.classes), **fields})
    root = None if is_image_folder(name) else spec.data_dir
    return create_dataset(name, split or "test", root, download=download, **fields)
