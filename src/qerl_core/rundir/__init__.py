"""The folder of one run: its files, checkpoints, checksums, locks and environment, and why it is refused."""
