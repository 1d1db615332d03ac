"""The axis `task`: questions, their split, prompts and rewards."""
