"""Data sets, one file per family."""
