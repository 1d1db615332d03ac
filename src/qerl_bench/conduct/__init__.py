"""Runs a study within a time: probes of its bases, then its arms."""
