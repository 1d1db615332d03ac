"""The axis `engine`: what samples completions of the policy, and checks of what it samples."""
