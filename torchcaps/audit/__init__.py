"""Audit of capsule networks: checks of any module for the known mistakes, by its behaviour."""

from torchcaps.audit.audit import audit
from torchcaps.audit.report import AuditReport, Finding, Verdict

__all__ = ["AuditReport", "Finding", "Verdict", "audit"]
