"""Mutated files for every reader of the data sets.

A mutant must be rejected with a `DataError` of one line that names the file, or be loaded. If the result differs from
that of the valid file, a warning must have reported it, unless the format makes this impossible. No mutant may end the
process, take minutes, raise anything else, or execute code: calls are inserted into pickles, also of a module on the
search path that leaves a file.
"""

import shutil
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch

from tests.fuzz.harness import Case, Target
from tests.fuzz.mutate import insert_call, mutate
from tests.fuzz.samples import Sample, list_samples, published
from torchcaps.data import DataError

__all__ = ["Readers"]

CANARY = "open({path!r}, 'w').close()\ndef run(*_): pass\nclass Net: pass\n"


class Readers(Target):
    """The readers of the data sets' files."""

    name, unit = "readers", "mutants"
    good = ("rejected", "unchanged", "reported", "undetectable")

    def prepare(self, work: Path) -> None:
        """Load the valid files; put a module on the search path that must not be imported."""
        self.executed, modules = work / "executed", work / "modules"
        modules.mkdir(exist_ok=True)
        (modules / "canary.py").write_text(CANARY.format(path=str(self.executed)))
        sys.path.append(str(modules))
        samples = list_samples()
        self.order = [sample for sample in samples for _ in range(sample.weight)]
        self.expected = {sample.name: _load_valid(sample, work / self.input) for sample in samples}

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Load one mutant."""
        rng = np.random.default_rng([seed, index])
        sample = self.order[int(rng.integers(len(self.order)))]
        content = sample.files[sample.target]
        if sample.is_pickle and rng.random() < 0.5:
            content = insert_call(content, str(self.executed), rng)
        else:
            content = mutate(content, rng)
        root = _write(sample, content, work / self.input)
        outcome, message = load_mutant(sample, self.expected[sample.name], root)
        if self.executed.exists():
            self.executed.unlink()
            sys.modules.pop("canary", None)
            outcome, message = "executed", "code in the file was executed"
        return Case(index, sample.name, outcome, message)


def _load_valid(sample: Sample, root: Path) -> list[torch.Tensor]:
    with warnings.catch_warnings(), published(sample):
        warnings.simplefilter("error")
        return sample.load(_write(sample, sample.files[sample.target], root))


def _write(sample: Sample, content: bytes, root: Path) -> Path:
    """Write the files of a sample with other content of its target; return their directory."""
    shutil.rmtree(root, ignore_errors=True)
    for path, data in {**sample.files, sample.target: sample.wrap(content)}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def load_mutant(sample: Sample, expected: list[torch.Tensor], root: Path) -> tuple[str, str]:
    """Load a mutant; return the outcome and a message. Failures have outcomes that are not in `Readers.good`."""
    try:
        with warnings.catch_warnings(record=True) as reported, published(sample):
            warnings.simplefilter("always")
            actual = sample.load(root)
    except DataError as error:
        message = str(error)
        if "\n" in message:
            return "several-lines", message
        if str(root) not in message:
            return "no-path", message
        return "rejected", message
    except BaseException as error:
        return "exception", "".join(traceback.format_exception(error)[-3:])
    equal = len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    if equal:
        return "unchanged", ""
    if any(issubclass(warning.category, UserWarning) for warning in reported):
        return "reported", ""
    return ("silent" if sample.detects else "undetectable"), "the data differ and nothing was reported"
