"""Whether runs in a format end where BF16 does: committed BF16 runs, tolerances, and a test of equivalence."""
