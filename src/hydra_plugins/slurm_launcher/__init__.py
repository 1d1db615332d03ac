"""Where Hydra looks for `hydra/launcher=slurm`; the work is in `qerl_bench/sweep`."""
