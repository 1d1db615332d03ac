"""What is published follows from what is committed: claims pages are made again, letter for letter."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.__main__ import main
from qerl_studies.commands.claims import main as report_claims
from qerl_studies.commands.figure import main as draw_figure
from qerl_studies.report.sessions import by_figure, contents, plotted, read_once
from qerl_studies.runs.committed import TIDY
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.measure import TRAINED_SHARE
from tests.conf.test_artifact import FOLLOWS, commands
from tests.scripts import script

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
COLLECTED = sorted(path.parents[1] for path in STUDIES.glob("*/data/settings.json*"))
IN_SESSIONS = sorted(path.parents[1] for path in STUDIES.glob("**/results/gates.md"))
BESIDE_GATES = {True: {"primary.md", "secondary.md"}, False: {"claims.md", "specification.csv"}}  # primary contrasts?


@pytest.mark.parametrize("study", COLLECTED, ids=lambda path: path.name)
def test_claims_pages_are_recomputed(study: Path, tmp_path: Path) -> None:
    pages = {"qerl": "claims", "literature": "literature", "rounded": "rounded"}
    committed = {papers: study / "results" / f"{page}.md" for papers, page in pages.items()}
    found = {papers: page for papers, page in committed.items() if page.is_file()}
    assert found, f"{study} has no verdicts"
    for papers, page in found.items():
        report_claims([str(study), "--papers", papers, "--out", str(tmp_path)])
        assert (tmp_path / page.name).read_text() == page.read_text()


@pytest.mark.parametrize("study", IN_SESSIONS, ids=lambda path: path.name)
def test_reports_of_studies_are_recomputed(study: Path) -> None:
    found = read_once(study)
    pages = {name: text for name, text in contents(found).items() if name.endswith((".md", ".csv"))}
    committed = [path for path in (study / "results").iterdir() if path.suffix in (".md", ".csv")]
    assert pages == {path.name: path.read_text() for path in committed}
    assert {"gates.md", "bases.md"} | BESIDE_GATES[found.design.primary is not None] <= {*pages}


def test_the_data_of_all_verdicts_are_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands of ARTIFACT.md, with another folder in the place of /tmp. All pages of claims have effects there.

    Folders have their whole paths, under which this process has read them before. Without the commits of the protocols
    where the history is cut off.
    """
    monkeypatch.chdir(ROOT)
    for command in commands(FOLLOWS):
        program, *words = shlex.split(command.replace("/tmp", str(tmp_path)))
        if program == "qerl-bench":
            assert main([str(ROOT / word) if (ROOT / word).is_dir() else word for word in words]) == 0
        elif "claims.json" not in command:
            subprocess.run([program, *words], check=True)
    found, committed = (json.loads((folder / "claims.json").read_text()) for folder in (tmp_path / "verdicts", STUDIES))
    for name, study in found["studies"].items():
        study["protocol_commit"] = study["protocol_commit"] or committed["studies"][name]["protocol_commit"]
    assert found == committed
    assert (tmp_path / "verdicts" / "verdicts.svg").read_text() == (STUDIES / "verdicts.svg").read_text()
    studies = {study.relative_to(STUDIES).as_posix() for study in (*COLLECTED, *IN_SESSIONS)}
    assert studies == {*found["studies"]}
    for one in found["verdicts"]:
        assert one["low"] is None or one["low"] <= one["effect"] <= one["high"]
        assert len(one["bases"]) == (one["units"]["n"] if one["units"]["kind"] == "base" else 1)


@pytest.mark.slow
def test_the_checkout_has_of_a_study_in_sessions_what_its_pages_read(tmp_path: Path) -> None:
    """Cut down again, it stays as it is."""
    committed, again = STUDIES / "shortcut-2026-doses", tmp_path / "study"
    shutil.copytree(committed, again)
    script("studies/keep.py").main([str(again)])
    files = sorted(committed.glob("data/*/*.parquet"))
    assert len(files) == 4
    assert all(file.read_bytes() == (again / file.relative_to(committed)).read_bytes() for file in files)


def test_of_runs_packed_with_probes_noisy_values_are_kept_to_nearly_five_digits(tmp_path: Path) -> None:
    """Rewards, accuracies and evaluations, of which there are words, stay as they are, as does what was cut before."""
    committed, again = STUDIES / "fair-2026" / "nf4" / "15b" / "data" / "2026-11-30-c", tmp_path / "session"
    shutil.copytree(committed, again)
    keep = script("studies/keep.py")
    keep.main([str(again)])
    assert all((again / file.name).read_bytes() == file.read_bytes() for file in committed.glob("*.parquet"))
    rows: Any = pd.read_parquet(again / TIDY)
    fine = rows.assign(value=rows["value"] * math.pi)
    fine.to_parquet(again / TIDY)
    keep.main([str(again)])
    kept: Any = pd.read_parquet(again / TIDY)
    order = ["kind", "metric", "run", "step"]
    fine, kept = (one.astype({name: str for name in order[:3]}).set_index(order)["value"] for one in (fine, kept))
    kept = kept.loc[fine.index]
    exact = (fine.index.get_level_values("kind") == "eval") | fine.index.get_level_values("metric").isin(keep.WHOLE)
    assert (kept[exact] == fine[exact]).all() and (kept != fine)[~exact & (fine != 0)].mean() > 0.9
    assert ((kept - fine).abs() <= fine.abs() * 2.0**-16).all()


def test_arms_too_many_for_one_figure_of_lines_are_drawn_by_what_they_are_compared_with() -> None:
    study = read_once(STUDIES / "worlds-2026-settings")
    found = {ending: [arm.name for arm in arms] for ending, arms in by_figure(study).items()}
    assert found == {
        "_bf16": ["bf16", "nvfp4", "bf16-rate3", "bf16-sft"],
        "_nvfp4": [
            "nvfp4", "nvfp4-rate3", "nvfp4-rank16", "nvfp4-rank64",
            "nvfp4-exp", "nvfp4-linear", "nvfp4-cosine", "nvfp4-log",
        ],
        "_bf16-sft": ["bf16-sft", "nvfp4-sft", "nf4-sft"],
    }  # fmt: skip
    for arms in by_figure(study).values():
        shades = [arm.shade for arm in plotted(study, arms).values()]
        assert len({*shades}) == len(shades)


def test_published_speeds_are_of_steps_that_trained() -> None:
    speeds = [run for study in COLLECTED for run in load_runs([study]) if run.environment.get("device") == "cuda"]
    assert len(speeds) >= 9
    for run in speeds:
        assert run.series("train", TRAINED_SHARE).min() > 0.9, run.name


def test_the_decoding_tables_of_the_kernels_page_are_the_committed_ones() -> None:
    results, page = ROOT / "kernels" / "results", (ROOT / "kernels" / "README.md").read_text()
    ours, vllm = (pd.read_csv(results / f"h200_{name}.csv") for name in ("decoding", "vllm_decoding"))
    by_batch = ["batch", "group", "format"]
    even, theirs = (table[table["new"] == 256].set_index(by_batch)["decode_tok_s"] for table in (ours, vllm))
    for (batch, group, _), mine in even.xs("nvfp4", level="format", drop_level=False).items():
        rows, peer = f"{batch}{', groups of 8' * (group == 8)}", theirs[batch, group, "nvfp4"]
        plain = even.get((batch, group, "bf16"))
        beside = "| | |" if plain is None else f"| {plain:,.0f} | {mine / plain:.2f} |"
        assert f"| {rows} | {mine:,.0f} {beside} {peer:,.0f} | {mine / peer:.2f} |" in page
    for row in ours[ours["way"] == "ragged"].to_dict("records"):
        cache = f"{row['cache_gib']:.1f}, of which {row['cache_used_gib']:.1f} were used"
        assert f"| {row['batch']:,} completions | {row['total_s']:.1f} | {row['tok_s']:,.0f} | {cache} |" in page
    assert f" {vllm['tok_s'].dropna().item():,.0f} | 22 s" in page


def test_the_times_of_8_bits_and_int4_are_what_was_measured() -> None:
    page = (ROOT / "kernels" / "README.md").read_text()
    rows = pd.read_csv(ROOT / "kernels" / "results" / "h200_symmetric.csv").set_index(
        ["layer", "tokens", "format", "adapter_rank"]
    )["us"]
    formats = [name for name in rows.index.unique("format") if name not in ("bfloat16", "nvfp4")]
    for (layer, tokens), times in rows.groupby(["layer", "tokens"], sort=False):
        plain = times[layer, tokens, "bfloat16", 0]
        cells = [f"{(own := times[layer, tokens, name, 32])} ({plain / own:.2f}x)" for name in formats]
        assert f"({layer.replace('x', ' x ')}) | {tokens} | {plain} | {' | '.join(cells)} |" in page
    assert len(rows) == 4 * 2 * 12


def test_what_an_adapter_costs_is_what_was_measured() -> None:
    page = (ROOT / "kernels" / "README.md").read_text()
    rows = pd.read_csv(ROOT / "kernels" / "results" / "h200_lora_cost.csv")
    speed = rows.set_index(["batch", "rank"])["decode_tok_s"]
    for batch, plain in speed.xs(0, level="rank").items():
        adapted = speed.get((batch, 32))
        beside = "| | |" if adapted is None else f"| {adapted:,.0f} | {100 * (1 - adapted / plain):.0f} % |"
        assert f"| {batch} | {plain:,.0f} {beside}" in page


def test_the_profile_of_a_step_is_what_was_measured() -> None:
    """Kernels of the blocks run at least once in each of 255 steps and 28 blocks."""
    page = (ROOT / "kernels" / "README.md").read_text()
    rows = pd.read_csv(ROOT / "kernels" / "results" / "h200_decoding_profile.csv")
    of_blocks = rows[rows["calls"] >= 255 * 28].groupby(["kernel", "batch"])["ms"].sum().unstack() / 255
    is_ours = ~of_blocks.index.str.contains("nvjet|cublas")
    for kernel, times in of_blocks[is_ours].iterrows():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{kernel}`"))
        assert line.endswith("".join(" |" if pd.isna(ms) else f" {ms:.2f} |" for ms in times))
    assert f"| together | {' | '.join(f'{ms:.1f}' for ms in of_blocks.sum())} |" in page
    assert is_ours.sum() == 8


def test_the_training_of_a_32b_is_what_was_measured() -> None:
    page = (STUDIES / "h200" / "README.md").read_text()
    steps = pd.read_csv(STUDIES / "h200" / "data" / "train_32b.csv")
    weights = 64 * (7168 * 5120 + 5120**2 + 55296 * 5120 + 5120 * 27648)  # of the blocks
    warm = steps[steps["step"] > 1].groupby(["recompute", "micro_batch_tokens"]).mean()
    for (recompute, tokens), row in warm.iterrows():
        share = 4 * weights * row["train_tok_s"] / 795e12
        numbers = f"{row['train_tok_s']:,.0f} | {100 * share:.0f} % | {row['train_reserved_gib']:.1f}"
        assert f"| `{recompute}` | {tokens:,} | {numbers} |" in page
    assert len(warm) == 2


def test_the_steps_beside_trl_are_what_was_measured() -> None:
    page = (STUDIES / "h200" / "README.md").read_text()
    steps = pd.read_csv(STUDIES / "h200" / "data" / "beside_trl.csv")
    warm = steps[steps["step"] > 1].groupby(["trainer", "sampler", "weights"])
    for (trainer, sampler, weights), row in warm.mean(numeric_only=True).iterrows():
        who = {"qerl-bench": "ours"}.get(trainer, trainer), {"hf": "`hf`"}.get(sampler, sampler), weights.upper()
        times = " | ".join(f"{row[part]:.1f}" for part in ("step_s", "rollout_s", "rest_s"))
        assert f"| {' | '.join(who)} | {times} | {row['peak_gib']:.1f} |" in page
    assert len(warm) == 4


def test_the_step_times_of_the_h200_page_are_the_committed_ones(tmp_path: Path) -> None:
    h200 = STUDIES / "h200"
    draw_figure(["step_times", str(h200 / "data" / "steps"), "--out", str(tmp_path)])
    assert (tmp_path / "step_times.csv").read_text() == (h200 / "results" / "step_times.csv").read_text()
    page = (h200 / "README.md").read_text()
    table = pd.read_csv(h200 / "results" / "step_times.csv")
    for row in table[table["model"] == "shape-7b"].to_dict("records"):
        times = [
            f"{row[part]:.1f} [{row[f'{part}_p20']:.1f}, {row[f'{part}_p80']:.1f}]"
            for part in ("step", "rollout", "train")
        ]
        rates = [f"{row[f'{part}_tok_s']:,.0f}" for part in ("rollout", "train")]
        peak = max(row["rollout_gib"], row["train_gib"])
        assert f"| {row['steps']} | {' | '.join(times)} | {' | '.join(rates)} | {peak:.1f} |" in page
