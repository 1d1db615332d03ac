"""Where Hydra looks for `hydra/launcher=process`; the work is in `qerl_bench/sweep`."""
