"""Runs of others: what their files hold, by which definitions, and what may be said about it."""
