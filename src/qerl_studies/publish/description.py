"""What is said of a published study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from qerl_core import __version__
from qerl_studies.publish.folder import Names
from qerl_studies.runs.cost import Cost
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import group_by_setting


@dataclass(frozen=True)
class Description:
    """What the card and both kinds of metadata say of a study; all of it comes from its runs."""

    names: Names
    license: str
    published: date
    runs: Sequence[Run]
    cost: Cost
    registered: str = ""  # what was registered before, in words

    @property
    def title(self) -> str:
        return self.names.name.rpartition("/")[2]

    @property
    def summary(self) -> str:
        tasks = ", ".join(self.values("task.name"))
        return (
            f"{len(self.runs)} runs of reinforcement learning of language models on weights in "
            f"{', '.join(self.values('quant.name'))}: {', '.join(self.values('model.name'))} on {tasks}, "
            f"{len(group_by_setting(self.runs))} settings. Measured with QeRL-Bench {__version__} to test claims of "
            "QeRL (arXiv 2510.11696)."
        )

    @property
    def sources(self) -> list[str]:
        """Addresses of models and data sets at the hub that the runs used."""
        found = {str(run.config["model"]["id"]): "" for run in self.runs if "id" in run.config["model"]}
        for run in self.runs:
            parts = (part for part in run.config["task"].values() if isinstance(part, dict) and "dataset_id" in part)
            found |= {str(part["dataset_id"]): "datasets/" for part in parts}
        return sorted(f"https://huggingface.co/{kind}{name}" for name, kind in found.items() if "<path>" not in name)

    def values(self, key: str) -> list[str]:
        return sorted({str(run.option(key)) for run in self.runs})
