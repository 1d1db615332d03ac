"""The subcommands that read runs: a file for each, with its name."""
