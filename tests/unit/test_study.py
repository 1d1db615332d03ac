"""A committed study: its runs are those that it was made from, and files that do not belong together are refused."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from qerl_core.checks import ConfigError
from qerl_core.metrics.definitions import definitions
from qerl_studies.runs.collect import STUDY_METRICS, STUDY_PREFIXES, dotted, write_study
from qerl_studies.runs.committed import SETTINGS, is_study, nested
from qerl_studies.runs.comparable import load_runs, tidy
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import Run, load_run

REPOSITORY = Path(__file__).parents[2]
ASSETS = REPOSITORY / "tests" / "assets" / "runs"
RUN, OTHER = "nvfp4-exp-grpo-r32-s1-a101d16e", "nvfp4-none-grpo-r32-s0-d8a0f9b2"
COMMITTED = sorted({path.parent for path in (REPOSITORY / "studies").rglob(f"{SETTINGS}*")})


def add_answers(run: Path, generator: np.random.Generator, more: bool) -> None:
    """Greedy answers once and sampled ones four times, of twenty questions at two steps; with `more`, all of them."""
    rows = [
        {"step": step, "mode": mode, "question": f"q{number:02}", "sample": sample, "correct": generator.random() < 0.4}
        for step in (0, 10)
        for mode, samples in (("greedy", 1), ("sampled", 4))
        for number in range(20)
        for sample in range(samples)
    ]
    table = pd.DataFrame(rows)
    if more:
        ends = [bool(end) for end in generator.random(len(rows)) < 0.9]
        table = table.assign(lenient=table["correct"], finished=ends, tokens=generator.integers(5, 50, len(rows)))
    table.to_parquet(run / "samples.parquet", index=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Eight small runs of this project, all but the first with answers."""
    shutil.copytree(ASSETS, tmp_path / "runs")
    generator = np.random.default_rng(0)
    for number, run in enumerate(find_runs(tmp_path / "runs")[1:]):
        add_answers(run, generator, more=number % 2 == 0)
    return tmp_path / "runs"


@pytest.fixture
def study(runs: Path, tmp_path: Path) -> Path:
    write_study(find_runs(runs), tmp_path / "study", mixed_code=False)
    return tmp_path / "study"


def assert_same(run: Run, kept: Run) -> None:
    assert (kept.config, kept.identity(), kept.finished) == (run.config, run.identity(), run.finished)
    assert kept.environment == {key: value for key, value in run.environment.items() if key != "argv"}
    assert kept.done == {key: run.done[key] for key in ("wall_s", "peak_memory_gib") if key in run.done}
    assert_frame_equal(kept.metrics, run.metrics)


def test_runs_that_were_collected_are_read_again_as_they_were(runs: Path, study: Path) -> None:
    before, after = load_runs([runs]), load_runs([study])
    assert [run.path for run in after] == [study / run.name for run in before]
    for run, kept in zip(before, after, strict=True):
        assert_same(run, kept)
    for run, kept in zip(before[1:], after[1:], strict=True):
        for mode in ("greedy", "sampled"):
            assert_frame_equal(kept.answers(mode), run.answers(mode))
            for column in ("lenient", "finished", "tokens") if run in before[1::2] else ():
                assert_frame_equal(kept.answers(mode, column), run.answers(mode, column))
            if run in before[2::2]:
                with pytest.raises(ConfigError, match="lenient"):
                    kept.answers(mode, "lenient")
    with pytest.raises(ConfigError, match=f"answers of {before[0].name} were not kept"):
        after[0].answers("greedy")
    assert_frame_equal(tidy(after), tidy(before))


def test_a_study_says_nothing_about_where_and_by_whom_its_runs_were_made(runs: Path, tmp_path: Path) -> None:
    path = find_runs(runs)[0]
    env = json.loads((path / "env.json").read_text())
    tables = {"/home/somebody/.cache/qerl/h200.json": "1f"}
    (path / "env.json").write_text(json.dumps(env | {"argv": ["/home/somebody/run.py"], "kernel_tables": tables}))
    config = (path / "config.yaml").read_text()
    wandb = "_target_: qerl_bench.logger.wandb.WandB\n  name: wandb\n  entity: somebody"
    config = config.replace("root: .", "root: /home/somebody").replace(
        "_target_: qerl_bench.logger.jsonl.LocalOnly\n  name: jsonl", wandb
    )
    assert config.count("somebody") == 2
    (path / "config.yaml").write_text(config)
    write_study([path], tmp_path / "study", mixed_code=False)
    assert "somebody" not in (tmp_path / "study" / SETTINGS).read_text()
    (kept,) = load_runs([tmp_path / "study"])
    assert kept.environment["kernel_tables"] == {"qerl/h200.json": "1f"}
    assert (kept.option("root"), kept.option("logger.name")) == (".", "jsonl")
    assert kept.identity() == load_run(path).identity()


def test_a_study_a_part_of_it_and_run_folders_are_read_alike(runs: Path, study: Path, tmp_path: Path) -> None:
    names = [path.name for path in find_runs(runs)]
    assert find_runs(study) == find_runs(study.parent / "study") == [study / name for name in names]
    assert find_runs(study / names[2]) == [study / names[2]]
    shutil.rmtree(runs / names[0])
    for name in names[4:]:
        shutil.rmtree(runs / name)
    again = tmp_path / "again"
    write_study([*find_runs(runs), *(study / name for name in (names[0], *names[4:]))], again, mixed_code=False)
    for first, second in zip(load_runs([study]), load_runs([again]), strict=True):
        assert_same(first, second)
    with pytest.raises(ConfigError, match=f"{names[1]} was found twice"):
        load_runs([runs, study])


def test_what_a_run_has_not_is_not_in_its_study(runs: Path, tmp_path: Path) -> None:
    first, second, *_ = find_runs(runs)
    (first / "done.json").unlink()
    (first / "env.json").unlink()
    (second / "metrics.jsonl").write_text("")
    write_study([first, second], tmp_path / "study", mixed_code=True)
    with pytest.raises(ConfigError, match=f"lacks steps of finished runs: {second.name}"):
        load_runs([tmp_path / "study"], mixed_code=True)
    (second / "done.json").unlink()
    write_study([first, second], tmp_path / "study", mixed_code=True)
    unfinished, empty = load_runs([tmp_path / "study"], mixed_code=True)
    assert (unfinished.finished, unfinished.done, unfinished.environment) == (False, {}, {})
    assert not empty.finished and empty.metrics.empty


def test_whole_numbers_empty_mappings_and_booleans_come_back_as_they_were(runs: Path, tmp_path: Path) -> None:
    paths = find_runs(runs)
    values = ["1", "1.0", "true", "{}", "{n: 1}", "[]", "null", "1e-5"]
    for path, value in zip(paths, values, strict=True):
        text = (
            (path / "config.yaml").read_text().replace("  name: arithmetic", f"  name: arithmetic\n  options: {value}")
        )
        (path / "config.yaml").write_text(text)
    write_study(paths, tmp_path / "study", mixed_code=False)
    found = [json.dumps(run.option("task.options")) for run in load_runs([tmp_path / "study"])]
    # 1 and 1.0 are one setting: they have one fingerprint, and the first run's spelling
    assert found == ["1", "1", "true", "{}", '{"n": 1}', "[]", "null", "1e-05"]


def test_dotted_keys_are_the_config_in_another_form() -> None:
    tree = {"a": {"b": {"c": 1, "d": {}}, "e": [{"f": 2}]}, "g": None}
    flat = {"a.b.c": 1, "a.b.d": {}, "a.e": [{"f": 2}], "g": None}
    assert dotted(tree) == flat and nested(flat) == tree


def test_an_earlier_study_in_the_folder_is_replaced_whole(runs: Path, study: Path) -> None:
    (study / "tidy.csv").write_text("old")
    write_study(find_runs(runs)[:1], study, mixed_code=False, metrics=["entropy"])
    assert sorted(file.name for file in study.iterdir()) == ["settings.json", "tidy.parquet"]
    (run,) = load_runs([study])
    assert set(run.metrics["metric"]) == {"entropy"}


def test_a_study_does_not_hide_the_runs_that_it_was_made_from(runs: Path, tmp_path: Path) -> None:
    for out in (runs, tmp_path):
        with pytest.raises(ConfigError, match=r"holds the runs themselves.*and 5 more.*--out DIR"):
            write_study(find_runs(runs), out, mixed_code=False)
    assert len(find_runs(tmp_path)) == 8


def edited(study: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((study / SETTINGS).read_text())
    change(content)
    (study / SETTINGS).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda content: content.pop("runs"), "has no runs"),
        (
            lambda content: content["settings"].pop(content["runs"][RUN]["fingerprint"]),
            "lacks the setting.* of nvfp4-exp",
        ),
        (lambda content: content["runs"][RUN].pop("seed"), "or the seed of nvfp4-exp"),
        (lambda content: content["environments"].clear(), "lacks .*the environment .*of bf16-.* 5 more"),
        (lambda content: content["config"].update(steps=11), "the config listed as .* has the fingerprint"),
        (
            lambda content: content["runs"].pop(RUN),
            rf"does not know 1 runs of tidy.parquet.*{RUN}",
        ),
        (
            lambda content: content["runs"][RUN].update(fingerprint=content["runs"][OTHER]["fingerprint"]),
            rf"under other fingerprints than \w+: {RUN}",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused(study: Path, change: Callable, complaint: str) -> None:
    edited(study, change)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_runs([study])
    assert str(study) in str(error.value) and f"qerl-bench collect RUNS out={study}" in str(error.value)


def test_answers_of_unknown_runs_are_refused(study: Path) -> None:
    answers = pd.read_parquet(study / "answers.parquet").astype({"run": "str"})
    stranger = answers[answers["run"] == answers["run"].iloc[0]].assign(run="stranger")
    pd.concat([answers, stranger]).to_parquet(study / "answers.parquet", index=False)
    with pytest.raises(ConfigError, match=r"answers of 1 runs that settings\.json does not know: stranger"):
        load_runs([study])
    pd.read_parquet(study / "tidy.parquet").drop(columns="step").to_parquet(study / "tidy.parquet")
    with pytest.raises(ConfigError, match=r"tidy\.parquet has no column step"):
        load_runs([study])


def test_runs_of_several_versions_of_the_code_are_refused_in_a_study_too(study: Path) -> None:
    def change(content: dict) -> None:
        del content["environment"]["code"]
        content["environments"] = [{"code": "1f"}, {"code": "2f"}]
        content["runs"][RUN]["environment"] = 1

    edited(study, change)
    with pytest.raises(ConfigError, match="2 versions of the code"):
        load_runs([study])
    assert len(load_runs([study], mixed_code=True)) == 8


def test_the_metrics_of_a_study_are_those_that_claims_and_figures_name() -> None:
    known = definitions()
    named = {
        node.value
        for folder in ("src/qerl_bench/study", "src/qerl_bench/claims", "src/qerl_bench/figures", "analysis")
        for file in (REPOSITORY / folder).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known
    }
    assert {name for name in named if not name.startswith(STUDY_PREFIXES)} <= set(STUDY_METRICS)


def test_a_study_holds_the_metrics_of_the_preset_and_every_evaluation(runs: Path, tmp_path: Path) -> None:
    write_study(find_runs(runs), tmp_path / "study", mixed_code=False, metrics=["study", "grad_norm"])
    written = set().union(*(run.metrics["metric"] for run in load_runs([runs])))
    wanted = {name for name in written if name in STUDY_METRICS or name.startswith("eval/")} | {"grad_norm"}
    kept = [set(run.metrics["metric"]) for run in load_runs([tmp_path / "study"])]
    assert set().union(*kept) == wanted
    assert {"mismatch/kl", "aqn/sigma", "time/step_s", "memory/peak_gib", "eval/accuracy_sampled_stderr"} < wanted


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_every_committed_study_is_whole_and_small(folder: Path) -> None:
    assert is_study(folder)
    loaded = load_runs([folder])
    table = pd.read_parquet(folder / "tidy.parquet", columns=["run", "fingerprint", "seed", "lr"]).drop_duplicates()
    in_table = {(row.run, row.fingerprint, row.seed, row.lr) for row in table.itertuples()}
    identities = [run.identity() for run in loaded]
    assert {tuple(one[key] for key in ("run", "fingerprint", "seed", "lr")) for one in identities} == in_table
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6


def test_what_identifies_the_base_model(runs: Path, study: Path) -> None:
    path = find_runs(runs)[0]
    made = load_run(path)
    assert made.base == (
        "tiny: hidden_size=128, layers=4, heads=4, kv_heads=2, intermediate_size=384, warm_start_steps=600, seed=0, "
        "task=arithmetic"
    )
    env = json.loads((path / "env.json").read_text())
    (path / "env.json").write_text(json.dumps(env | {"base": "sha256:1f"}))
    assert load_run(path).base == load_run(path).identity()["base"] == "sha256:1f"
    write_study(find_runs(runs), study, mixed_code=False)
    assert [run.base for run in load_runs([study])] == ["sha256:1f"] + [made.base] * 7
    hub = {"name": "qwen", "id": "Qwen/Qwen2.5-7B", "revision": None}
    first = Run(path, made.config | {"model": hub}, {}, False, {}, made.metrics)
    second = Run(path, made.config | {"model": hub | {"revision": "a1"}}, {}, False, {}, made.metrics)
    assert (first.base, second.base) == ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B@a1")


def test_the_block_names_machine_and_libraries_as_far_as_they_were_recorded(runs: Path) -> None:
    made = load_run(find_runs(runs)[0])

    def block(**environment: object) -> str:
        return Run(made.path, made.config, dict(environment), False, {}, made.metrics).block

    packages = {"triton": "3.6", "numpy": "2.4", "torch": "2.11", "wandb": "1", "peft": None, "bitsandbytes": "0.5"}
    assert block(device="cpu", cpu="EPYC", packages=packages) == "cpu, EPYC, torch 2.11, bitsandbytes 0.5, numpy 2.4"
    assert block(device="cuda", gpu="H200", packages={"torch": "2.11", "triton": "3.6"}) == (
        "H200, torch 2.11, triton 3.6"
    )
    assert block() == "unknown"
