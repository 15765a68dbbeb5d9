"""A fixed slice of the mutated requests to the explorer; ``make fuzz`` runs more of them."""

from tests.fuzz.harness import fuzz
from tests.fuzz.uploads import Uploads
from tests.sampling import all_cases

N_MUTANTS = 600 if all_cases() else 80


def test_mutated_requests_are_rejected_or_answered() -> None:
    report = fuzz(Uploads(), seed=0, budget=N_MUTANTS, isolated=False)
    assert report.failures == []
    assert set(report.by_outcome()) == set(Uploads.good)
