"""Model profiling: layer table and memory estimate."""
