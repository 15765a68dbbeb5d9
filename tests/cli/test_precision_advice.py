"""Recommendation of bfloat16 in ``torchcaps show``, with given descriptions of the processor."""

import torch

from torchcaps.cli.show import precision_advice
from torchcaps.models import create_model
from torchcaps.profiling.summary import ModelSummary, summarize


def summary_of(name: str) -> ModelSummary:
    with torch.device("meta"):
        return summarize(create_model(name))


def test_only_processors_with_native_bfloat16_are_advised() -> None:
    summary = summary_of("sabour2017_mnist")  # two 9x9 convolutions
    assert precision_advice(summary, "flags : fma avx2 avx512f") is None
    for features, name in (("avx512f avx512_bf16", "AVX512_BF16"), ("amx_tile amx_bf16", "AMX")):
        advice = precision_advice(summary, features)
        assert advice is not None
        assert name in advice
        assert "--precision bf16-mixed" in advice


def test_models_that_are_mostly_capsule_layers_are_not_advised() -> None:
    assert precision_advice(summary_of("tsai2020_cifar10"), "amx_bf16") is None
