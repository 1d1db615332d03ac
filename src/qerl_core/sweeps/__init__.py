"""What a sweep and those who look at it share: its points, its list, the state and pace of its runs."""
