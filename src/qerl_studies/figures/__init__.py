"""Figures of runs and studies, drawn into files or shown by a notebook."""

import os
import sys

if "ipykernel" not in sys.modules:  # a shell may hand on the backend of a notebook, which may not be installed here
    os.environ["MPLBACKEND"] = "agg"
