"""Evaluation with the tasks of lm-eval."""
