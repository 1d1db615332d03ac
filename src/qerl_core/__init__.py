"""The contract of everybody who makes or reads runs: words, run folders, records, statistics. Imports no trainer."""

__version__ = "0.1.0"
