"""Measurements of the papers: each returns the numbers of a record, and a function draws a figure from the record."""
