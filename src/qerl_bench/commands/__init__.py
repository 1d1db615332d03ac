"""One file for each subcommand of qerl-bench, with its name, and how all of them exit."""
