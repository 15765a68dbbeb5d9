"""Reproduction engine: schema of tables and figures, planner, runner, record store, statistics, rendering."""
