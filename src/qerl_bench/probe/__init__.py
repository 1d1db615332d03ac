"""Asks a model before any training: its answers in every format, and what noise does to them."""
