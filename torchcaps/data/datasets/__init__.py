"""Data sets, one module per family. Each module of this package is imported by the registry and registers its names."""
