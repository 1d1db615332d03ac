"""Tasks of lm-eval whose rows lie in files beside their YAML: our held-out questions, and lm-eval's own benchmarks.

Imports lm-eval, so import it only where it is used. The classes are named by the task YAMLs that eval=lm_eval writes,
which makes those complete: `lm_eval --include_path RUN/lm_eval --tasks NAME` asks any other model the same questions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from hydra.utils import instantiate
from lm_eval.api.task import ConfigurableTask

from qerl_bench.records import Prompt
from qerl_bench.task.grader.latex import is_found_in


class Local(ConfigurableTask):
    """Rows from the JSONL files under `dataset_kwargs.data_files`, one for each split, named from the YAML's folder."""

    def __init__(self, config: dict[str, Any], **changed: Any) -> None:
        self.folder = Path(config["metadata"]["config_source"]).parent  # lm-eval says there which YAML it read
        super().__init__(config={key: value for key, value in config.items() if key != "class"} | changed)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: object) -> None:
        """Read the files into memory. The loader of `datasets` would copy them to a cache in the home folder first and
        report the download to a server."""
        assert dataset_kwargs is not None
        self.dataset = {}
        for split, path in dataset_kwargs["data_files"].items():
            with open(self.folder / path) as file:
                self.dataset[split] = Dataset.from_list([json.loads(line) for line in file])


class HeldOut(Local):
    """Our questions, judged by the task spec under `metadata.judge`."""

    def __init__(self, config: dict[str, Any]) -> None:
        judge = instantiate(config["metadata"]["judge"], _convert_="all")

        def judged(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
            prompt = Prompt(id=doc["id"], messages=tuple(doc["messages"]), answer=doc["gold"])
            reward = judge.reward(prompt, results[0])
            return {"correct": float(reward.correct), "reward": reward.total}

        super().__init__(config, process_results=judged)


class Standard(Local):
    """A benchmark of lm-eval: its own counting, or math-verify on the whole text where its YAML names that."""

    def __init__(self, config: dict[str, Any]) -> None:
        def judged(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
            return {"math_verify": float(is_found_in(doc["answer"], results[0]))}

        by_math_verify = any(metric["metric"] == "math_verify" for metric in config["metric_list"])
        super().__init__(config, **({"process_results": judged} if by_math_verify else {}))
