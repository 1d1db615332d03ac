"""Many runs: points, which are checked before the first one starts, what runs them, and their state."""
