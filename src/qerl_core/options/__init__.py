"""Words of the command line to configs: option files and names, the user's own options, suggestions, fingerprints."""
