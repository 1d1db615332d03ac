"""`python src/run.py quant=nvfp4 aqn=exp -m lora.rank=16,32,64`: run one experiment, or a sweep with -m."""

import sys

from qerl_bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
