"""Measurements of the papers: analyses on trained networks, and what they cost, each as numbers for a record."""
