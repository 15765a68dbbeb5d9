import pytest

from tests import conftest
from tests.sampling import ALL_CASES_VARIABLE, all_cases, covering_sample, sample

PRODUCT = [(a, b) for a in "vwxyz" for b in range(20)]


@pytest.fixture(autouse=True)
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_CASES_VARIABLE, raising=False)


def test_sample_is_reproducible_and_keeps_the_order() -> None:
    chosen = sample(PRODUCT, 7)
    assert len(chosen) == 7
    assert chosen == sorted(chosen)
    assert chosen == sample(PRODUCT, 7)
    assert chosen != sample(PRODUCT, 7, seed=1)
    assert set(chosen) <= set(PRODUCT)


def test_sample_returns_all_cases_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(PRODUCT, 1000) == PRODUCT
    monkeypatch.setenv(ALL_CASES_VARIABLE, "1")
    assert sample(PRODUCT, 7) == PRODUCT
    assert covering_sample(PRODUCT, 7, [lambda case: case[0]]) == PRODUCT
    monkeypatch.setenv(ALL_CASES_VARIABLE, "0")
    assert not all_cases()


@pytest.mark.parametrize("n", [0, 20, 30])
def test_covering_sample_contains_every_value(n: int) -> None:
    keys = [lambda case: case[0], lambda case: case[1]]
    chosen = covering_sample(PRODUCT, n, keys)
    assert len(chosen) == max(n, 20)
    assert {a for a, _ in chosen} == set("vwxyz")
    assert {b for _, b in chosen} == set(range(20))
    assert len(covering_sample([(case,) for case in PRODUCT], n, [lambda case: case[0][0]])) >= n


def test_covering_sample_accepts_attribute_names() -> None:
    cases = [complex(real, imaginary) for real in range(3) for imaginary in range(9)]
    chosen = covering_sample(cases, 3, ["real", "imag"])
    assert {case.real for case in chosen} == set(range(3))
    assert {case.imag for case in chosen} == set(range(9))


@pytest.mark.parametrize("option", [False, True])
def test_option_sets_the_variable(option: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.setenv(ALL_CASES_VARIABLE, "0")  # restored after the test
    monkeypatch.setattr(pytestconfig.option, "all_cases", option)
    conftest.pytest_configure(pytestconfig)
    assert all_cases() == option
