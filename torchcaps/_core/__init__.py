"""Utilities shared by all packages: validation, registry, atomic files, randomness, serialisation, plotting."""
