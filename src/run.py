"""`python src/run.py quant=nvfp4 aqn=exp -m lora.rank=16,32,64`: run one experiment, or a sweep with -m."""

import sys

try:
    from qerl_bench.__main__ import main
except ModuleNotFoundError as missing:
    ours = ("qerl_core", "qerl_studies", "qerl_bench", "hydra_plugins")  # which lie beside this file
    if (missing.name or "").split(".")[0] in ours:
        raise
    sys.exit(
        f"error: {sys.executable} has no module {missing.name}. If you ran `make run` or `make setup`, type "
        "`source .venv/bin/activate` first; else `pip install -e .`"
    )

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
