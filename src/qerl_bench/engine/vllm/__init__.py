"""Sampling with vLLM: its process, and how weights and adapters get there."""
