"""What is read of probes: numbers of answers, over units, tables and advice."""
