"""All that a run imports and reads, for the process from which others are forked; nobody looks for garbage in it.

Libraries remember what they make once: patterns, grammars, classes of a model. So a model is made here, too.
"""

import gc
import sys
from importlib import import_module
from pathlib import Path

# The process begins without pytest's paths, and would find the installed package, which may be of another checkout.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("src", "kernels")]

from qerl_core.process.hidden_packages import hidden_packages  # noqa: E402

gc.disable()
with hidden_packages():
    for name in (
        "hydra._internal.core_plugins.basic_sweeper",
        "hydra_plugins.process_launcher.launcher",
        "hydra_plugins.slurm_launcher.launcher",
        "matplotlib.backends.backend_agg",
        "pyarrow.dataset",
        "qerl_bench.commands.run",
        "qerl_bench.engine.hf",
        "qerl_bench.eval.task",
        "qerl_bench.experiment",
        "qerl_studies.figures.run",
        "qerl_studies.tables.terminal",
        "transformers.models.qwen2.modeling_qwen2",
    ):
        import_module(name)
    import torch

    import tests.quick_compose
    import tests.unchanging  # noqa: F401
    from qerl_bench.config import build, compose
    from qerl_bench.model_setup import build_policy
    from tests.parallel.threads import one_thread

    one_thread()
    policy = build_policy(build(compose(["experiment=smoke", "device=cpu", "quant=nvfp4", "aqn=exp"])), None, "cpu")
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        policy.token_stats(ids, ids.bool(), 1.0)
    del policy, ids
import_module("qerl_bench.eval.untrained").installed()  # reads files of 300 packages, and is read once
gc.collect()
gc.freeze()
gc.enable()
