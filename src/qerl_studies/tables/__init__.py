"""Tables of runs, for the terminal and for a paper."""
