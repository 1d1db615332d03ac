"""Claims of papers, the contrasts that test them, and verdicts."""
