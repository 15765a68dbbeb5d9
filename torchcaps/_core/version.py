"""The version of the package, read by the build back end."""

__version__ = "0.1.0"
