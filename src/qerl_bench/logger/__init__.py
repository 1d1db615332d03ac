"""The axis `logger`: mirrors of metrics.jsonl at W&B and others."""
