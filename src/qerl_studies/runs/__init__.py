"""Runs and committed studies as they are read: loading, collecting, settings, measures, cost."""
