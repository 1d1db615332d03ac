"""A task's held-out questions as a task of lm-eval, judged by the task's own reward.

Imports lm-eval, so import it only where it is used. The class is named by the task YAML that eval=lm_eval writes, which
makes that YAML complete: `lm_eval --include_path RUN/lm_eval --tasks NAME` asks any other model the same questions.
"""

from __future__ import annotations

import json
from typing import Any

from datasets import Dataset
from hydra.utils import instantiate
from lm_eval.api.task import ConfigurableTask

from qerl_bench.records import Prompt


class HeldOut(ConfigurableTask):
    """Questions from the JSONL file under `dataset_kwargs`, judged by the task spec under `metadata.judge`."""

    def __init__(self, config: dict[str, Any]) -> None:
        judge = instantiate(config["metadata"]["judge"], _convert_="all")

        def judged(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
            prompt = Prompt(id=doc["id"], messages=tuple(doc["messages"]), answer=doc["gold"])
            reward = judge.reward(prompt, results[0])
            return {"correct": float(reward.correct), "reward": reward.total}

        fields = {key: value for key, value in config.items() if key != "class"}
        super().__init__(config=fields | {"process_results": judged})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: object) -> None:
        """Read the file into memory. The loader of `datasets` would copy it to a cache in the home folder first and
        report the download to a server."""
        assert dataset_kwargs is not None
        with open(dataset_kwargs["data_files"]["test"]) as file:
            self.dataset = {"test": Dataset.from_list([json.loads(line) for line in file])}
