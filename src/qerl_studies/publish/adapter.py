"""A run as the hub takes it: the adapter in PEFT's format, the run's config and numbers, and a model card.

Left out: full-parameter runs (lora=none), whose checkpoint is a whole model; optimizer and random state; completions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from qerl_core.checks import require
from qerl_core.rundir.checkpoints import check_checkpoint, last_checkpoint
from qerl_studies.publish.folder import Names, rendered
from qerl_studies.runs.collect import public
from qerl_studies.runs.committed import NOT_KEPT
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.private import Private

METRICS = {  # of eval/*, in the order of the card
    "accuracy_sampled": "accuracy, sampled (pass@1)",
    "accuracy_greedy": "accuracy, greedy",
    "lenient_sampled": "right by the last number, sampled",
    "lenient_greedy": "right by the last number, greedy",
    "pass_at_k": "pass@k",
    "majority": "majority of the samples",
    "gain_sampled": "gain over the base, sampled",
    "gain_greedy": "gain over the base, greedy",
}


def write_adapter(path: Path, out: Path, names: Names, private: Private) -> None:
    """Write the adapter of the finished run in `path`, its config, its numbers and a card to `out`.

    Raises ConfigError for a run that is unfinished, damaged, or without an adapter.
    """
    run = load_run(path)
    require(run.finished, f"{path} is not finished: the same command that began it continues it; publish it then")
    require(
        run.option("lora.name") != "none",
        f"{path} was trained with lora=none and has no adapter. Publish its numbers: pass the folder that holds it",
    )
    checkpoint = last_checkpoint(path)
    require(checkpoint is not None, f"{path} has no checkpoint left, so its adapter is gone: run it again")
    assert checkpoint is not None
    check_checkpoint(checkpoint)
    shutil.copyfile(checkpoint / "adapter" / "adapter_model.safetensors", out / "adapter_model.safetensors")
    trained_norms = (checkpoint / "norms.safetensors").is_file()
    if trained_norms:
        shutil.copyfile(checkpoint / "norms.safetensors", out / "norms.safetensors")
    config = private.hidden({key: value for key, value in run.config.items() if key not in NOT_KEPT})
    settings = private.hidden(json.loads((checkpoint / "adapter" / "adapter_config.json").read_text()))
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    (out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (out / "env.json").write_text(json.dumps(private.hidden(public(run.environment)), indent=1))
    shutil.copyfile(path / "metrics.jsonl", out / "metrics.jsonl")
    (out / "README.md").write_text(card(run, config, names, private, trained_norms))


def card(run: Run, config: Mapping[str, Any], names: Names, private: Private, trained_norms: bool) -> str:
    """The model card: a header that the hub reads, and a page for people. `config` has nothing private."""
    base = config["model"].get("id")
    at_hub = base is not None and "<path>" not in base and base.count("/") == 1
    served = config["eval"].get("quant")
    weights = f", on {served} weights" if served else ""
    scores = [row for name, label in METRICS.items() if (row := _score(run, name, label + weights))]
    header = ModelCardData(
        license=names.license,
        library_name="peft",
        base_model=base if at_hub else None,
        tags=["lora", "reinforcement-learning", "qerl-bench", f"quant:{config['quant']['name']}"],
        pipeline_tag="text-generation",
        model_name=names.name.rpartition("/")[2],
        eval_results=_results(config, scores) or None,
    )
    return rendered(
        "model.md",
        header=header.to_yaml(),
        title=names.name.rpartition("/")[2],
        author=names.author,
        license=names.license,
        address=names.repo or "PATH_OF_THIS_FOLDER",
        base=base,
        at_hub=at_hub,
        model=config["model"],
        weights=private.hidden(run.base),
        options={key: config[key]["name"] for key in ("quant", "quantizer", "aqn", "algo", "task", "engine")},
        config=config,
        fingerprint=run.identity()["fingerprint"],
        code=run.code,
        block=run.block,
        scores=scores,
        steps=run.last_step,
        trained_norms=trained_norms,
        collapse=run.done.get("collapse"),
    )


def _score(run: Run, name: str, label: str) -> dict[str, Any] | None:
    """A metric of the last evaluation with its standard error, and what it was before training, if it was measured."""
    values, errors = run.series("eval", f"eval/{name}"), run.series("eval", f"eval/{name}_stderr")
    if values.empty or values.index[-1] == 0:
        return None
    step = values.index[-1]
    before, error = (
        float(series.loc[at]) if at in series.index else None for series, at in ((values, 0), (errors, step))
    )
    return {"name": name, "label": label, "value": float(values.to_numpy()[-1]), "stderr": error, "before": before}


def _results(config: Mapping[str, Any], scores: list[dict[str, Any]]) -> list[EvalResult]:
    """The scores as the model-index of the card has them."""
    task = config["task"]
    source = task.get("eval") if isinstance(task.get("eval"), dict) else {}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source.get("dataset_id", f"qerl-bench/{task['name']}"),
            dataset_name=f"{task['name']}, held out",
            metric_type="accuracy" if "accuracy" in score["name"] else score["name"],
            metric_name=score["label"],
            metric_value=score["value"],
        )
        for score in scores
    ]
