"""Command line of the fuzz suite: ``python -m tests.fuzz [TARGET ...]``, or ``make fuzz``.

The default time of ten minutes is divided among the targets. The counts are printed; inputs of failures are saved in
the directory of ``--out``, whose paths are printed, and the exit status is 1.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fuzz.exports import Exports
from tests.fuzz.harness import FuzzReport, Target, fuzz
from tests.fuzz.hub import Hub
from tests.fuzz.kills import Kills
from tests.fuzz.layers import Layers
from tests.fuzz.readers import Readers
from tests.fuzz.runs import Runs
from tests.fuzz.uploads import Uploads
from torchcaps._core.machine import describe_machine

TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (Readers, Runs, Exports, Hub, Uploads, Layers, Kills)
}


def main() -> None:
    """Run the targets and print their reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz readers, run directories, layers.")
    parser.add_argument("targets", nargs="*", help=f"any of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--start", type=int, default=0, help="index of the first case, to repeat one with --budget 1")
    parser.add_argument("--budget", type=int, default=10**9, help="number of cases per target (default: by time)")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="time of all targets together")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="directory for inputs of failures")
    parser.add_argument("--record", type=Path, help="write command, seed, counts, time, machine and commit to a file")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := sorted(set(names) - set(TARGETS)):
        parser.error(f"unknown target {unknown[0]!r}: expected any of {', '.join(TARGETS)}")
    reports: list[FuzzReport] = []

    def show(report: FuzzReport) -> None:
        """Print the progress of a target and write the record so far."""
        failures = f", {len(report.failures)} failures" if report.failures else ""
        print(f"{report.target.name}: {report.n_evaluations:,} {report.target.unit}{failures}", flush=True)
        write_record(options, [*reports, report])

    for name in names:
        seconds = options.max_seconds / len(names)
        print(f"{name}: seed {options.seed}, at most {seconds:.0f} s", flush=True)
        target, out = TARGETS[name](), options.out.absolute()
        report = fuzz(target, options.seed, options.budget, out, seconds, start=options.start, on_progress=show)
        print(f"{report}\n", flush=True)
        reports.append(report)
        write_record(options, reports)
    raise SystemExit(any(report.failures for report in reports))


def write_record(options: argparse.Namespace, reports: list[FuzzReport]) -> None:
    """Write the file of ``--record``, if it is given."""
    if options.record is not None:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps(make_record(options.seed, reports), indent=1) + "\n")


def make_record(seed: int, reports: list[FuzzReport]) -> dict[str, Any]:
    """Return the record of a fuzz run: command, seed, commit, machine, and the counts of each target."""
    return {
        "command": shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").split("\n") if _git("diff") else [],
        "seed": seed,
        "machine": describe_machine(),
        "targets": {
            report.target.name: {
                report.target.unit: report.n_evaluations,
                "cases": report.n_cases,
                "seconds": round(report.seconds, 1),
                "failures": report.failures,
                "outcomes": report.by_outcome(),
                "groups": report.by_group(),
            }
            for report in reports
        },
    }


def _git(*arguments: str) -> str:
    """Return the output of git; an empty string if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
