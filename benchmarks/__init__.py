"""Measurements, side by side in one run; what does not agree is not timed."""
