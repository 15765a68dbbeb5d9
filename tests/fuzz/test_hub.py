"""A fixed slice of the mutated directories of the Hub; ``make fuzz`` runs more of them."""

from tests.fuzz.harness import fuzz
from tests.fuzz.hub import MUTATIONS, Hub
from tests.sampling import all_cases

N_MUTANTS = 300 if all_cases() else 40


def test_mutated_directories_are_rejected_or_loaded() -> None:
    report = fuzz(Hub(), seed=0, budget=N_MUTANTS, isolated=False)
    assert report.failures == []
    assert set(report.by_outcome()) == set(Hub.good)
    assert set(report.by_group()) == set(MUTATIONS)
