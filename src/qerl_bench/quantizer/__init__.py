"""The axis `quantizer`: how codes of packed weights are chosen."""
