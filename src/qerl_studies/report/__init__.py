"""Pages of claims, studies, runs and sessions."""
