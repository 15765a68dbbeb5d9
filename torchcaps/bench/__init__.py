"""How fast layers and models are: beside the usual way to write them, and beside what their arithmetic costs."""

from torchcaps.bench.cases import CASES, Case
from torchcaps.bench.naive import make_explicit
from torchcaps.bench.timing import compare, matmul_rate, measure_case

__all__ = ["CASES", "Case", "compare", "make_explicit", "matmul_rate", "measure_case"]
