"""Audit of capsule networks: checks of any module for the known mistakes, by its behaviour."""

from torchcaps.audit.audit import audit
from torchcaps.audit.report import AuditReport, AuditVerdict, Finding

__all__ = ["AuditReport", "AuditVerdict", "Finding", "audit"]
