"""What is read from runs. Only `conduct` imports the trainer."""
