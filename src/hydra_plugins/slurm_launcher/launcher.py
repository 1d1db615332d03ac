"""hydra/launcher=slurm: every point is a task of a Slurm job array."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from qerl_bench.sweep.slurm import SlurmOptions, SlurmSweep


@dataclass
class SlurmLauncherConf(SlurmOptions):
    _target_: str = "hydra_plugins.slurm_launcher.launcher.SlurmLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmLauncherConf, provider="slurm_launcher")


class SlurmLauncher(SlurmSweep):
    """Hydra looks for launchers here only."""
