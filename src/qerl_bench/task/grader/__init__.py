"""Whether a completion holds the right answer."""
