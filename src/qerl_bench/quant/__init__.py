"""The axis `quant`: weight formats, packed layers, and what foreign files may say of them (`foreign_config.py`)."""
