"""What a run will take before it begins: seconds, GiB and dollars, from committed measurements (docs/estimate.md)."""
