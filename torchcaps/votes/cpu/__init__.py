"""Compiled CPU kernel for reductions of votes; optional, torch computes the same without it."""
