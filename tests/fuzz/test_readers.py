"""A fixed slice of the mutated files; ``make fuzz`` runs more of them."""

import numpy as np

from tests.fuzz.harness import fuzz
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import Readers
from tests.fuzz.samples import list_samples
from tests.sampling import all_cases

N_MUTANTS = 300 if all_cases() else 60


def test_mutated_files_are_rejected_or_reported() -> None:
    report = fuzz(Readers(), seed=0, budget=N_MUTANTS, isolated=False)
    assert report.failures == []
    assert report.n_evaluations == N_MUTANTS
    assert {"rejected", "unchanged", "reported"} <= set(report.by_outcome()) <= set(Readers.good)


def test_samples_have_unique_names() -> None:
    names = [sample.name for sample in list_samples()]
    assert len(set(names)) == len(names)


def test_mutations_are_reproducible_and_change_the_data() -> None:
    data = bytes(range(256)) * 4
    first, again = ([mutate(data, np.random.default_rng([seed, 0])) for seed in range(50)] for _ in range(2))
    assert first == again
    assert sum(mutant != data for mutant in first) > 40
    assert len(set(first)) > 40
    assert mutate(b"", np.random.default_rng(0)) is not None
