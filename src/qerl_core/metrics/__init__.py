"""What a run measures: definitions, which readers need too, and sums, which the loop makes."""
