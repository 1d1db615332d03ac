"""Tasks of lm-eval that read their rows from files next to their YAML: our held-out questions and lm-eval's benchmarks.

Imports lm-eval, so import this module only where it is used. The task YAMLs that eval=lm_eval writes name these classes
and are complete: `lm_eval --include_path RUN/lm_eval --tasks NAME` asks any other model the same questions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from hydra.utils import instantiate
from lm_eval.api.task import ConfigurableTask

from qerl_bench.task.grader.latex import is_found_in
from qerl_core.records import Prompt


class LocalTask(ConfigurableTask):
    """Reads rows from the JSONL files in `dataset_kwargs.data_files`, one per split, relative to the YAML's folder."""

    def __init__(self, config: dict[str, Any], **changed: Any) -> None:
        self.folder = Path(config["metadata"]["config_source"]).parent  # the YAML that lm-eval has read
        super().__init__(config={key: value for key, value in config.items() if key != "class"} | changed)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: object) -> None:
        """Read the files into memory. `datasets.load_dataset` would copy them to a cache in the home folder and report
        the download to a server."""
        assert dataset_kwargs is not None
        self.dataset = {}
        for split, path in dataset_kwargs["data_files"].items():
            with open(self.folder / path) as file:
                self.dataset[split] = Dataset.from_list([json.loads(line) for line in file])

    def build_all_requests(self, *, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        """Build the requests of all ranks and keep those of this one: worked examples are drawn question by question,
        so a rank that built its own alone would ask other prompts than a single process."""
        super().build_all_requests(**options)
        self._instances = self.instances[rank::world_size]  # one for each question


class HeldOut(LocalTask):
    """Our questions, graded by the task whose config is `metadata.judge`."""

    def __init__(self, config: dict[str, Any]) -> None:
        task = instantiate(config["metadata"]["judge"], _convert_="all")

        def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
            prompt = Prompt(id=doc["id"], messages=tuple(doc["messages"]), answer=doc["gold"])
            reward = task.reward(prompt, results[0])  # lm-eval does not say which completions were cut off
            return {"correct": float(reward.correct), "reward": reward.total}

        super().__init__(config, process_results=process_results)


class Standard(LocalTask):
    """A benchmark of lm-eval. Its metrics are lm-eval's own, but math_verify is computed here, on the whole text."""

    def __init__(self, config: dict[str, Any]) -> None:
        def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
            return {"math_verify": float(is_found_in(doc["answer"], results[0]))}

        uses_math_verify = any(metric["metric"] == "math_verify" for metric in config["metric_list"])
        super().__init__(config, **({"process_results": process_results} if uses_math_verify else {}))
