"""Check the strength of the test suite: apply known bugs to a copy of the package and require that tests fail.

    python tools/mutations.py                 # all mutations of tests/mutations.toml
    python tools/mutations.py NAME ... -j 2   # some of them, two at a time
    python tools/mutations.py --list          # print the mutations and which are stale; run nothing

Each mutation replaces one piece of source text. Its tests run twice, in temporary copies of the repository: on the
unmodified copy, where they must pass, and on the mutated copy, where at least one must fail. The working tree is only
read. Results:

    caught                 the tests pass without the mutation and fail with it
    survived               the tests pass with the mutation: they do not detect the bug
    stale                  the text to replace is not in the file exactly once: update the mutation
    test-fails-unmutated   the tests fail, or do not exist, without the mutation
    error                  with the mutation pytest could not run the tests, for example because an import failed

The exit code is 0 if all mutations are caught, 1 if any is not, and 2 for invalid arguments or an invalid file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS_FILE = ROOT / "tests/mutations.toml"
PACKAGE = "torchcaps"
TEST_TIMEOUT_S = 200  # per test: a mutation may cause an endless loop
PROCESS_TIMEOUT_S = 900  # per pytest process
# Not copied: version control, environments, caches (all hidden), bytecode, and the output of training runs.
NOT_COPIED = (".*", "__pycache__", "runs", "build", "dist", "*.egg-info")

PYTEST_PASSED, PYTEST_FAILED = 0, 1  # exit codes of pytest; the others are errors of collection or usage


class Result(StrEnum):
    """Result of one mutation."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    STALE = "stale"
    TEST_FAILS_UNMUTATED = "test-fails-unmutated"
    ERROR = "error"


@dataclass(frozen=True)
class Mutation:
    """A bug to introduce.

    Args:
        name: unique identifier.
        description: one sentence that states the bug.
        file: path of the source file, relative to the repository.
        old: text to replace; must occur in the file exactly once.
        new: replacement.
        tests: pytest node ids that pass without the mutation and fail with it.
    """

    name: str
    description: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def is_stale(self, root: Path = ROOT) -> bool:
        """Return whether ``old`` does not occur in the file exactly once."""
        path = root / self.file
        return not path.is_file() or path.read_text(encoding="utf-8").count(self.old) != 1

    def apply(self, root: Path) -> None:
        """Replace the text in a copy of the repository."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


def read_mutations(path: Path = MUTATIONS_FILE) -> list[Mutation]:
    """Read and validate the list of mutations."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", [])
    if not tables:
        raise ValueError(f"{path}: expected one or more [[mutation]] tables")
    mutations = [_parse(table, path) for table in tables]
    names = [mutation.name for mutation in mutations]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: name {name!r} is not unique")
    return mutations


def _parse(table: dict[str, Any], path: Path) -> Mutation:
    label = f"{path}: mutation {table.get('name', '(unnamed)')!r}"
    expected = {field.name for field in fields(Mutation)}
    if table.keys() != expected:
        different = ", ".join(sorted(table.keys() ^ expected))
        raise ValueError(f"{label}: missing or unknown keys: {different}")
    tests = table["tests"]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"{label}: tests must be a list of one or more pytest node ids, got {tests!r}")
    texts = [*(table[name] for name in expected - {"tests"}), *tests]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{label}: all values must be strings, and tests a list of strings")
    if not table["old"] or table["old"] == table["new"]:
        raise ValueError(f"{label}: old must not be empty and must differ from new")
    return Mutation(**{**table, "tests": tuple(tests)})


@contextmanager
def repository_copy() -> Iterator[Path]:
    """Copy the repository to a temporary directory that is removed on exit."""
    with tempfile.TemporaryDirectory(prefix="torchcaps-mutation-") as directory:
        copy = Path(directory).resolve() / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield copy


def run_pytest(copy: Path, tests: Sequence[str], *options: str, own_cache: bool = False) -> int:
    """Run tests in a copy of the repository and return pytest's exit code.

    Args:
        copy: the copy.
        tests: pytest node ids.
        options: further arguments of pytest.
        own_cache: keep compiled kernels in the copy, not in the user's cache.
    """
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    if own_cache:
        environment["XDG_CACHE_HOME"] = str(copy / ".cache")
    _check_import(copy, environment)
    limit = f"--timeout={TEST_TIMEOUT_S}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", limit, *options, *tests]
    try:
        return subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_TIMEOUT_S,
        ).returncode
    except subprocess.TimeoutExpired:
        return PYTEST_FAILED


def _check_import(copy: Path, environment: dict[str, str]) -> None:
    """Raise an error if the package would not be imported from the copy: an editable install names another path."""
    script = f"import importlib.util; print(importlib.util.find_spec({PACKAGE!r}).origin)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=copy, env=environment, capture_output=True, text=True, check=True
    )
    origin = Path(done.stdout.strip()).resolve()
    if not origin.is_relative_to(copy):
        raise RuntimeError(f"{PACKAGE} would be imported from {origin}, expected a path in {copy}")


def failing_unmutated(mutations: Sequence[Mutation], jobs: int) -> set[str]:
    """Return the names of the mutations whose tests do not pass in an unmodified copy."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    if not tests:
        return set()
    with repository_copy() as copy:
        parallel = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 else ()
        if run_pytest(copy, tests, *parallel) == PYTEST_PASSED:  # all at once: one start of pytest
            return set()
        return {m.name for m in mutations if run_pytest(copy, m.tests) != PYTEST_PASSED}


def run_mutated(mutation: Mutation) -> Result:
    """Run the tests of one mutation in a mutated copy."""
    with repository_copy() as copy:
        mutation.apply(copy)
        code = run_pytest(copy, mutation.tests, own_cache=mutation.file.endswith(".cpp"))
    if code in (PYTEST_PASSED, PYTEST_FAILED):
        return Result.SURVIVED if code == PYTEST_PASSED else Result.CAUGHT
    with repository_copy() as copy:  # pytest ignores a missing test of a file that is to be run as a whole as well
        passes = run_pytest(copy, mutation.tests) == PYTEST_PASSED
    return Result.ERROR if passes else Result.TEST_FAILS_UNMUTATED


def run(mutations: Sequence[Mutation], jobs: int) -> dict[str, Result]:
    """Run all mutations, print a row for each as it finishes, and return the results by name."""
    width = max(len(mutation.name) for mutation in mutations)
    results: dict[str, Result] = {}

    def report(name: str, result: Result, seconds: float | None = None) -> None:
        results[name] = result
        print(f"{name:{width}}  {result:20}  {'' if seconds is None else f'{seconds:5.1f} s'}".rstrip(), flush=True)

    for mutation in mutations:
        if mutation.is_stale():
            report(mutation.name, Result.STALE)
    current = [mutation for mutation in mutations if mutation.name not in results]
    start = time.monotonic()
    failing = failing_unmutated(current, jobs)
    print(f"{'(all tests, unmutated)':{width}}  {'':20}  {time.monotonic() - start:5.1f} s", flush=True)
    for name in sorted(failing):
        report(name, Result.TEST_FAILS_UNMUTATED)

    def timed(mutation: Mutation) -> tuple[str, Result, float]:
        start = time.monotonic()
        result = run_mutated(mutation)
        return mutation.name, result, time.monotonic() - start

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(timed, mutation) for mutation in current if mutation.name not in failing]
        for future in as_completed(futures):
            report(*future.result())
    return results


def print_list(mutations: Sequence[Mutation]) -> int:
    """Print the mutations and return how many are stale."""
    stale = [mutation.name for mutation in mutations if mutation.is_stale()]
    for mutation in mutations:
        state = " (stale)" if mutation.name in stale else ""
        print(f"{mutation.name}{state}\n  {mutation.description}\n  {mutation.file}")
        for test in mutation.tests:
            print(f"    {test}")
    print(f"{len(mutations)} mutations, {len(stale)} stale")
    return len(stale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Apply known bugs to a copy of the package; require that tests fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutations and which are stale; run nothing")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="mutations at a time (default: 1)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be 1 or more, got {options.jobs}")
    try:
        mutations = read_mutations()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    unknown = [name for name in options.names if name not in {mutation.name for mutation in mutations}]
    if unknown:
        parser.error(f"unknown mutation {unknown[0]!r}: --list prints all names")
    chosen = [mutation for mutation in mutations if not options.names or mutation.name in options.names]
    if options.list:
        return 1 if print_list(chosen) else 0
    start = time.monotonic()
    results = run(chosen, options.jobs)
    counts = {result: list(results.values()).count(result) for result in Result}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    print(f"{summary}; {time.monotonic() - start:.0f} s")
    return 0 if counts[Result.CAUGHT] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
