"""All that a run imports, for the process from which others are forked; nobody looks for garbage among it."""

import gc
from importlib import import_module

from qerl_bench.process.hidden_packages import hidden_packages

gc.disable()
with hidden_packages():
    for name in (
        *(
            "qerl_bench.experiment",
            "qerl_bench.engine.hf",
            "qerl_bench.studies.tables.terminal",
            "qerl_bench.studies.figures.run",
        ),
        "transformers.models.qwen2.modeling_qwen2",
    ):
        import_module(name)
gc.freeze()
gc.enable()
