"""Reproduction of published results: declare runs and measurements, plan and run them, store and render records."""
