"""A fixed slice of the mutated ONNX, .h5 and .npz files; ``make fuzz`` runs more of them."""

from tests.fuzz.exports import MUTATIONS, Exports
from tests.fuzz.harness import fuzz
from tests.sampling import all_cases

N_MUTANTS = 500 if all_cases() else 70


def test_mutated_models_are_rejected_or_loaded() -> None:
    report = fuzz(Exports(), seed=0, budget=N_MUTANTS, isolated=False)
    assert report.failures == []
    assert set(report.by_outcome()) == set(Exports.good)
    assert set(report.by_group()) == set(MUTATIONS)
