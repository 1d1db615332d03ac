"""Reads runs: claims, designs, tables, figures, pages, and what is published. Needs no torch."""
