"""Runs and studies in the form in which others get them."""
