"""Result of an audit: one finding per check."""

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AuditReport", "AuditVerdict", "Finding"]


class AuditVerdict(enum.Enum):
    """Result of a check.

    >>> AuditVerdict("passed").name
    'PASSED'
    """

    PASSED = "passed"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    """The module declares that it lacks the invariant, with a reason."""
    NOT_CHECKED = "not checked"
    """The module, or the arguments of the audit, do not provide what the check needs."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        check: name of the check.
        verdict: its result.
        tried: what was tried.
        result: what was found, with its numbers; for a check that did not run, the reason.
        why: why it matters.
        numbers: the numbers by name.

    >>> finding = Finding("permutation", AuditVerdict.PASSED, "permuted children", "equal parents", "sums commute")
    >>> finding.verdict.value
    'passed'
    """

    check: str
    verdict: AuditVerdict
    tried: str
    result: str
    why: str
    numbers: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "tried": self.tried,
            "result": self.result,
            "why": self.why,
            "numbers": {key: x if abs(x) < float("inf") else str(x) for key, x in self.numbers.items()},
        }


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit.

    Args:
        name: the audited module.
        findings: one for each check.

    >>> finding = Finding("permutation", AuditVerdict.PASSED, "permuted children", "equal parents", "sums commute")
    >>> report = AuditReport("layer", (finding,))
    >>> report.passed, report.failures
    (True, ())
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings of the checks that failed."""
        return tuple(finding for finding in self.findings if finding.verdict is AuditVerdict.FAILED)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(check)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"name": self.name, "passed": self.passed, "findings": [f.to_json() for f in self.findings]}


def make_finding(check: str, is_good: bool, tried: str, result: str, why: str, **numbers: float) -> Finding:
    """Return the finding of a check that passed or failed."""
    return Finding(check, AuditVerdict.PASSED if is_good else AuditVerdict.FAILED, tried, result, why, numbers)
