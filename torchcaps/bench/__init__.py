"""Benchmarks: speed and memory of layers, models, data and training, compared with a naive baseline.

Everything here is run by ``torchcaps bench``. Results are only timed after values and gradients were compared.
"""

from torchcaps.bench.cases import CASES, Case
from torchcaps.bench.naive import use_naive_votes
from torchcaps.bench.timing import compare, matmul_rate, measure_case

__all__ = ["CASES", "Case", "compare", "matmul_rate", "measure_case", "use_naive_votes"]
