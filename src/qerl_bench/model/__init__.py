"""The axis `model`: base models, their folders and files, the policy, its forward pass, its checks."""
