"""Reading run directories: every number once, damage named by file and line, and the terminal table."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_core.checks import ConfigError
from qerl_core.exits import guarded
from qerl_core.metrics import definitions
from qerl_studies.commands.collect import main as collect_runs
from qerl_studies.runs.collect import write_study
from qerl_studies.runs.comparable import load_runs, tidy
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import load_run
from qerl_studies.runs.settings import describe_repeats, group_by_setting
from qerl_studies.tables.terminal import no_gradient_warning, render, summary, wrapped
from tests import run_folders
from tests.run_folders import DONE, SHORT

REPOSITORY = Path(__file__).parents[2]
LINES = [
    {
        "kind": "eval", "step": 0, "time": 10.0, "eval/accuracy_greedy": 0.25, "eval/accuracy_greedy_stderr": 0.02,
        "eval/accuracy_sampled": 0.2, "eval/accuracy_sampled_stderr": 0.01,
    },
    {
        "kind": "train", "step": 1, "time": 11.0, "reward/mean": 0.5, "entropy": 0.9, "speed/rollout_tok_s": 100.0,
        "train/taught_frac": 1.0,
    },
    {
        "kind": "train", "step": 2, "time": 12.0, "reward/mean": None, "entropy": 0.8, "speed/rollout_tok_s": 2000.0,
        "train/taught_frac": 0.0,
    },
    {
        "kind": "train", "step": 3, "time": 13.0, "reward/mean": 0.75, "entropy": 0.7, "speed/rollout_tok_s": 3000.0,
        "train/taught_frac": 0.25,
    },
    {
        "kind": "eval", "step": 3, "time": 14.0, "eval/accuracy_greedy": 0.5, "eval/accuracy_greedy_stderr": 0.03,
        "eval/accuracy_sampled": 0.4, "eval/accuracy_sampled_stderr": 0.015,
        "eval/gain_greedy": 0.25, "eval/gain_greedy_stderr": 0.025,
    },
]  # fmt: skip


def write_run(folder: Path, lines: list[dict[str, Any]] = LINES, finished: bool = True, **changes: object) -> Path:
    config = SHORT | {"optim": {"lr": 1e-5}} | changes
    return run_folders.write_run(folder, config, lines, DONE | {"wall_s": 4.0} if finished else None)


def write_hub_run(folder: Path, model: dict[str, str], base: str | None, **changes: object) -> Path:
    run = write_run(folder, **{"model": {"lr": 1e-5, **model}, **changes})  # type: ignore[arg-type]  # changes of config
    (run / "env.json").write_text(json.dumps({"code": "c", "device": "cpu"} | ({"base": base} if base else {})))
    return run


QWEN = {"name": "qwen3-4b", "id": "Qwen/Qwen3-4B"}


@pytest.mark.parametrize(
    ("other", "base"),
    [
        (QWEN, "sha256:2"),  # the repository changed
        ({"name": "qwen3-4b", "id": "/home/me/qwen3-4b"}, "sha256:2"),
        ({"name": "qwen3-4b", "id": "Somebody/qwen3-4b"}, None),  # of a run without a digest, the id counts
        ({"name": "qwen3-4b", "seed": "0"}, "sha256:2"),  # made here
    ],
)
def test_two_models_of_one_name_are_not_compared(tmp_path: Path, other: dict[str, str], base: str | None) -> None:
    runs = [write_hub_run(tmp_path / "a", QWEN, "sha256:1"), write_hub_run(tmp_path / "b", other, base)]
    with pytest.raises(
        ConfigError, match=r"(?s)2 models are called qwen3-4b.*sha256:1: a\n.*: b\n.*model.id=DIR"
    ) as refusal:
        load_runs(runs)
    with pytest.raises(ConfigError, match="2 models are called qwen3-4b"):
        write_study(runs, tmp_path / "out", mixed_code=True)
    assert "another name" in str(refusal.value)


def test_one_model_from_two_places_is_one_setting(tmp_path: Path) -> None:
    places = [QWEN, {"name": "qwen3-4b", "id": "/models/Qwen3-4B"}]
    runs = load_runs(
        [write_hub_run(tmp_path / str(seed), place, "sha256:1", seed=seed) for seed, place in enumerate(places)]
    )
    (setting,) = group_by_setting(runs)
    assert [base for base, _ in setting.by_cell] == ["sha256:1"] * 2
    assert describe_repeats(runs) == "2 seeds of one base model (qwen3-4b) on arithmetic"


def test_several_bases_made_from_seeds_are_one_kind_of_model(tmp_path: Path) -> None:
    made = [
        write_hub_run(tmp_path / str(seed), {"name": "tiny", "seed": str(seed)}, f"sha256:{seed}") for seed in (0, 1)
    ]
    assert len(group_by_setting(load_runs(made))) == 1


def write_gguf_run(path: Path, weights: str, digest: str = "sha256:file", **drawn: float) -> Path:
    run = write_hub_run(path, {"name": "m", "id": "/models/m.gguf", "dither": drawn.get("dither")}, weights)
    env, undrawn = json.loads((run / "env.json").read_text()), {"dither": None, "dither_scale": None}
    (run / "env.json").write_text(json.dumps(env | {"gguf": {"digest": digest} | undrawn | drawn}))
    return run


def test_copies_that_dither_draws_of_one_file_are_bases_of_one_model(tmp_path: Path) -> None:
    runs = [write_gguf_run(tmp_path / "file", "sha256:a")]
    runs += [write_gguf_run(tmp_path / str(dither), f"sha256:{dither}", dither=dither) for dither in (0, 1)]
    runs += [write_gguf_run(tmp_path / "scaled", "sha256:2", dither=1, dither_scale=0.5)]
    (setting,) = group_by_setting(load_runs(runs))
    assert {base for base, _ in setting.by_cell} == {
        "sha256:file",
        "sha256:file, copy 0",
        "sha256:file, copy 1",
        "sha256:file, copy 1 x 0.5",
    }
    runs[-1] = write_gguf_run(tmp_path / "other", "sha256:3", "sha256:another")
    with pytest.raises(ConfigError, match="2 models are called m"):
        load_runs(runs)


def test_a_copy_is_one_base_whatever_dtype_its_weights_were_stored_in(tmp_path: Path) -> None:
    runs = [write_gguf_run(tmp_path / dtype, f"sha256:{dtype}", dither=1) for dtype in ("bfloat16", "float32")]
    assert len({run.cell for run in load_runs(runs)}) == 1


def test_runs_are_found_at_any_depth_and_not_inside_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "study" / "b")
    write_run(run / "checkpoints" / "copy")
    write_run(tmp_path / "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text("name: c")  # no metrics yet: not a run to read
    assert find_runs(tmp_path) == [tmp_path / "a", run]
    assert find_runs(run) == [run]


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_runs_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=folder):
        find_runs(tmp_path / folder)


def test_every_number_is_one_row(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a"))
    written = {
        (line["kind"], line["step"], name): value
        for line in LINES
        for name, value in line.items()
        if name not in ("kind", "step")
    }
    read = {(row.kind, row.step, row.metric): row.value for row in run.metrics.itertuples()}
    assert len(run.metrics) == len(written) == len(read)
    null = read.pop(("train", 2, "reward/mean"))
    assert math.isnan(null) and written.pop(("train", 2, "reward/mean")) is None
    assert read == written


def test_series_are_in_order_of_steps_whatever_keys_a_line_has(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": 3, "entropy": 0.3},
        {"kind": "train", "step": 1, "entropy": 0.1, "loss": 5},
        {"kind": "train", "step": 2, "loss": 6, "entropy": 0.2},
        {"kind": "eval", "step": 2, "entropy": 9.0},
    ]
    run = load_run(write_run(tmp_path / "a", lines))
    assert run.series("train", "entropy").to_dict() == {1: 0.1, 2: 0.2, 3: 0.3}
    assert list(run.series("train", "entropy").index) == [1, 2, 3]
    assert run.series("train", "loss").to_dict() == {1: 5.0, 2: 6.0}
    assert run.series("train", "kl").empty


def test_infinity_in_the_file_is_as_unknown_as_null(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", LINES[:1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1, "loss": Infinity, "kl": NaN}\n')
    run = load_run(folder)
    assert run.series("train", "loss").isna().all() and run.series("train", "kl").isna().all()


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_half_written_last_line_is_dropped_with_a_warning_while_the_run_goes_on(tmp_path: Path, ending: str) -> None:
    folder = write_run(tmp_path / "still-going", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "rew' + ending)
    with pytest.warns(UserWarning, match="still-going.*line 6.*half-written"):
        run = load_run(folder)
    assert not run.finished and run.done == {}
    assert run.metrics["step"].max() == 3


def test_a_half_written_last_line_of_a_finished_run_is_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 6"):
        load_run(folder)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"kind": "train", "step": 9,', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"step": 9, "loss": 1.0}', "`kind` must be"),
        ('{"kind": "train", "step": 9.5, "loss": 1.0}', "`step` must be"),
        ('{"kind": "train", "step": true}', "`step` must be"),
        ('{"kind": "train", "step": 9, "loss": "1.0"}', "loss must be a number or null, got '1.0'"),
        ('{"kind": "train", "step": 1, "loss": 1.0}', "repeats line 2"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    folder = write_run(tmp_path / "a", finished=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    with pytest.raises(ConfigError) as error:
        load_run(folder)
    assert f"{folder / 'metrics.jsonl'}, line 4" in str(error.value) and complaint in str(error.value)


@pytest.mark.parametrize("text", ["name: [unclosed", "", "- 1\n- 2", "a: ${nowhere}"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_run(folder)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        load_run(tmp_path)
    folder = write_run(tmp_path / "a")
    (folder / "done.json").write_text("{")
    with pytest.raises(ConfigError, match=r"done\.json is not JSON"):
        load_run(folder)
    run = load_run(write_run(tmp_path / "b", model={}))
    with pytest.raises(ConfigError, match=r"no key model\.name"):
        run.identity()


def test_the_tidy_table_says_what_each_number_belongs_to(tmp_path: Path) -> None:
    first = load_run(write_run(tmp_path / "first", seed=7))
    full = {"name": "none", "rank": 8}  # the rank of an adapter that is not there
    second = load_run(write_run(tmp_path / "second", LINES[:2], False, quant={"name": "bf16"}, lora=full))
    table = tidy([first, second])
    assert list(table.columns) == [
        "run", "quant", "aqn", "quantizer", "algo", "lora_rank", "model", "task", "base", "seed", "lr", "fingerprint",
        "finished", "kind", "step", "metric", "value",
    ]  # fmt: skip
    assert len(table) == len(first.metrics) + len(second.metrics)
    identity = table.drop(columns=["kind", "step", "metric", "value", "fingerprint"]).drop_duplicates()
    assert identity.astype(object).to_numpy().tolist() == [
        ["first", "nvfp4", "exp", "rtn", "grpo", 32, "tiny", "arithmetic", "tiny: task=arithmetic", 7, 1e-5, True],
        ["second", "bf16", "exp", "rtn", "grpo", 0, "tiny", "arithmetic", "tiny: task=arithmetic", 0, 1e-5, False],
    ]
    row = table[(table["run"] == "first") & (table["metric"] == "entropy") & (table["step"] == 3)]
    assert row[["kind", "value"]].to_numpy().tolist() == [["train", 0.7]]
    assert table[table["run"] == "second"]["metric"].nunique() == 9  # the first run's other metrics are not invented


def test_the_fingerprint_is_that_of_the_config_without_its_seed(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / "a", seed=0)),
        load_run(write_run(tmp_path / "b", seed=1)),
        load_run(write_run(tmp_path / "c", aqn={"name": "exp", "sigma_start": 0.02})),
    ]
    a, b, c = (run.identity()["fingerprint"] for run in runs)
    assert a == b != c


def test_a_run_without_any_line_still_has_a_place_in_the_table(tmp_path: Path) -> None:
    empty = load_run(write_run(tmp_path / "empty", [], finished=False))
    assert empty.metrics.empty
    assert list(tidy([empty, load_run(write_run(tmp_path / "a"))])["run"].unique()) == ["a"]
    assert tidy([empty]).empty


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / place / "a")) for place in ("x", "y")]
    with pytest.raises(ConfigError, match="run a was found twice"):
        tidy(runs)
    with pytest.raises(ConfigError, match="no runs"):
        tidy([])


def test_runs_are_left_out_by_name(tmp_path: Path) -> None:
    for name in ("nf4-s0", "nf4-s1", "bf16-s1"):
        write_run(tmp_path / name)
    assert [run.name for run in load_runs([tmp_path], without=["*-s1", "bf16*"])] == ["nf4-s0"]
    with pytest.raises(ConfigError, match="--except nf4 fits none of the 3 runs"):
        load_runs([tmp_path], without=["*-s1", "nf4"])


def test_summary_takes_the_right_steps(tmp_path: Path) -> None:
    table = summary([write_run(tmp_path / "a")])
    expected = {
        "run": "a", "finished": True, "model": "tiny", "format": "nvfp4", "noise": "exp", "rank": 32, "seed": 0,
        "one_text": False,
        "greedy_start": 0.25, "greedy_start_stderr": 0.02, "greedy_final": 0.5, "greedy_final_stderr": 0.03,
        "gain_final": 0.25, "gain_final_stderr": 0.025,
        **dict.fromkeys(("lenient_start", "lenient_start_stderr", "lenient_final", "lenient_final_stderr"), ANY_NAN),
        "sampled_start": 0.2, "sampled_start_stderr": 0.01, "sampled_final": 0.4, "sampled_final_stderr": 0.015,
        "entropy_first": 0.9, "entropy_last": 0.7,
        "rollout_tok_s": 2500.0,  # median of steps 2 and 3; step 1 is warm-up
        "taught": pytest.approx(1.25 / 3), "taught_last": 1.0,
        "peak_gib": 0.5,
    }  # fmt: skip
    assert table.to_dict("records") == [expected]


def test_peak_memory_of_an_unfinished_run_is_the_largest_so_far(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "memory/peak_gib": gib} for step, gib in [(1, 0.2), (2, 0.7), (3, 0.6)]]
    assert summary([write_run(tmp_path / "a", lines, finished=False)])["peak_gib"].tolist() == [0.7]


def test_the_rendered_table_is_aligned_and_marks_what_is_not_there(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a-rather-long-name"), write_run(tmp_path / "b", LINES[:1], finished=False)]
    text = render(summary(folders), ["", "steps=4"])
    shared, top, heading, first, second, blank, *named = text.splitlines()
    assert shared == "model tiny, format nvfp4, noise exp, rank 32, seed 0"
    assert " ".join(first.split()) == "1 25.0 ±2.0 50.0 ±3.0 +25.0 ±2.5 40.0 ±1.5 0.900 0.700 2,500 0.42 0.50"
    assert " ".join(second.split()) == "2 25.0 ±2.0 - - - - - - - -"
    assert len(heading) == len(first) == len(second) < 100
    assert heading.index("step 0") + len("step 0") == first.index("25.0 ±2.0") + len("25.0 ±2.0")
    assert top.split() == ["accuracy", "accuracy", "gain", "sampled", "entropy"]
    assert not blank and [line.split() for line in named[:2]] == [["1", folders[0].name], ["2", "b", "*", "steps=4"]]
    notes = text.splitlines()
    assert notes[-1] == "* not finished" and "* not finished" not in render(summary(folders[:1]))
    assert render(summary(folders[:1])).startswith(f"{folders[0].name}, {shared}\n")
    assert render(summary([])) == "no runs"


def test_lenient_accuracy_stands_in_the_table_of_runs_that_have_it(tmp_path: Path) -> None:
    """Nearly all of this gain is the format: by the last number the base could do most of it."""
    lines = [
        line | {"eval/lenient_greedy": 0.45 if line["step"] == 0 else 0.5} if line["kind"] == "eval" else line
        for line in LINES
    ]
    table = summary([write_run(tmp_path / "new", lines), write_run(tmp_path / "old")])
    assert table["lenient_start"].tolist() == [0.45, ANY_NAN]
    text = render(table)
    rows = [line.replace(" ±", "±").split() for line in text.splitlines()[3:5]]
    assert [row[1:5] for row in rows] == [["25.0±2.0", "50.0±3.0", "+25.0±2.5", both] for both in ("45.0→50.0", "-→-")]
    assert "lenient" in text and "lenient" not in render(summary([tmp_path / "old"]))


def test_the_table_of_a_sweep_names_only_options_that_differ(tmp_path: Path) -> None:
    table = summary([write_run(tmp_path / "a"), write_run(tmp_path / "b")]).assign(format=["nf4", "mxfp4"], seed=[0, 1])
    shared, _, heading, first, *_ = render(table).splitlines()
    assert shared == "model tiny, noise exp, rank 32"
    assert heading.split()[:3] == ["run", "format", "seed"] and first.split()[:3] == ["1", "nf4", "0"]


ANY_NAN = pytest.approx(math.nan, nan_ok=True)
GRID = {
    "model": ["tiny", "qwen3-30b-a3b-instruct-2507"],
    "format": ["nvfp4", "mxfp4"],
    "noise": ["none", "exp_paper"],
    "rank": [8, 128],
    "seed": [0, 11],
}
LARGE = {"greedy_final": 1.0, "entropy_first": 11.93, "rollout_tok_s": 98_765.0, "peak_gib": 100.25}


@pytest.mark.parametrize("numbers", [{}, LARGE], ids=["usual", "large"])
@pytest.mark.parametrize("varied", [keys for size in range(1, 5) for keys in combinations(GRID, size)], ids=" ".join)
def test_the_table_of_a_sweep_fits_a_terminal(
    tmp_path: Path, varied: tuple[str, ...], numbers: dict[str, float]
) -> None:
    """Whatever four options vary: nothing is lost, and long values are wrapped."""
    points = [dict(zip(varied, values, strict=True)) for values in product(*(GRID[key] for key in varied))]
    usual = summary([write_run(tmp_path / "a")]).to_dict("records")[0] | numbers
    table = pd.DataFrame([usual | point for point in points])
    text = render(table, ["optim.lr=3e-05 rollout.temperature=0.7 importance_sampling.mode=truncate"] * len(points))
    assert max(map(len, text.splitlines())) <= 100
    assert text.replace(" ±", "±").count("+25.0±2.5") == text.count("rollout.temperature=0.7") == len(points)


@pytest.mark.parametrize(
    ("varied", "shown"), [(["format", "noise"], True), (["model", "format", "noise", "rank"], False)]
)
def test_the_widest_table_has_no_room_for_lenient_accuracy(tmp_path: Path, varied: list[str], shown: bool) -> None:
    row = summary([write_run(tmp_path / "a")]).to_dict("records")[0] | LARGE
    wide = row | {"lenient_start": 0.125, "lenient_final": 1.0}
    text = render(pd.DataFrame([wide | {key: GRID[key][at] for key in varied} for at in (0, 1)]))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("12.5→100.0") == 2 * shown and ("lenient" in text) == shown


@pytest.mark.parametrize("width", [5, 8, 30])
def test_a_wrapped_value_is_whole(width: int) -> None:
    for value in ("exp_paper", "qwen3-30b-a3b-instruct-2507", "none", ""):
        pieces = wrapped(value, width)
        assert "".join(pieces) == value and max(map(len, pieces)) <= width
    assert wrapped("exp_paper", 8) == ["exp_", "paper"] and wrapped("entropy", 5) == ["entro", "py"]


@pytest.mark.parametrize(
    ("shares", "warned"),
    [
        ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], True),
        ([0.0, 0.0], True),
        ([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], False),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.01], False),
        ([None, None], False),  # of a version that did not measure it
    ],
)
def test_a_run_whose_last_five_steps_taught_nothing_is_named(
    tmp_path: Path, shares: list[float | None], warned: bool
) -> None:
    lines = [{"kind": "train", "step": step, "train/taught_frac": share} for step, share in enumerate(shares, start=1)]
    table = summary([write_run(tmp_path / "plain"), write_run(tmp_path / "a", lines)])
    warning = no_gradient_warning(table)
    assert (warning is not None) == warned
    if warning is not None:
        assert warning.startswith("a: ") and "train/taught_frac = 0" in warning and "task=shape" in warning


def test_collect_writes_the_same_table_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A half-written line of a run that goes on is reported and left out."""
    runs = [write_run(tmp_path / "runs" / name, seed=seed, finished=name != "b") for seed, name in enumerate("ab")]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "rew')
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--metrics", "all", "--csv"]
    with pytest.warns(UserWarning, match="b: dropped line 6"):
        collect_runs(words)
    assert "2 runs, 1 of them unfinished, 54 numbers" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="half-written"):
        expected = tidy(load_run(run) for run in runs)
    parquet = pd.read_parquet(tmp_path / "out" / "tidy.parquet")
    pd.testing.assert_frame_equal(parquet, expected)
    text = pd.read_csv(tmp_path / "out" / "tidy.csv", dtype={"fingerprint": str})
    assert list(text.columns) == list(expected.columns)
    assert text["value"].equals(expected["value"]) and text["metric"].tolist() == expected["metric"].tolist()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "settings.json", "tidy.csv", "tidy.parquet",
    ]  # fmt: skip


def test_a_script_says_in_a_line_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        warnings.simplefilter("always")
        warnings.warn("half a line was dropped", stacklevel=1)
        raise ConfigError("no run in this folder")

    with pytest.raises(SystemExit, match="2"):
        guarded(main)
    assert capsys.readouterr().err == "half a line was dropped\nerror: no run in this folder\n"


def test_collect_takes_the_metrics_that_are_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    collect_runs([str(tmp_path), "--out", str(tmp_path / "out"), "--metrics", "entropy", "reward/mean"])
    assert pd.read_parquet(tmp_path / "out" / "tidy.parquet")["metric"].value_counts().to_dict() == {
        "entropy": 3, "reward/mean": 3,
        **dict.fromkeys({name for line in LINES for name in line} - {"kind", "step", "entropy", "reward/mean"}, 0),
    }  # fmt: skip


def test_collect_leaves_out_a_damaged_run_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a")
    with (write_run(tmp_path / "runs" / "b") / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    collect_runs([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().err.split())
    assert f"left out: {tmp_path / 'runs' / 'b' / 'metrics.jsonl'}, line 6: not a JSON object" in said
    assert [run.name for run in load_runs([tmp_path / "out"])] == [
        run.name for run in load_runs([tmp_path / "runs" / "a"])
    ]


def environment(folder: Path, **env: object) -> Path:
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_runs_of_several_versions_of_the_code_are_refused_unless_that_is_known(tmp_path: Path) -> None:
    """The digest of the sources decides, whatever the commit; runs from before it have their commit only."""
    for name in "abcde":
        environment(write_run(tmp_path / name), code="1f", commit=name)
    assert len(load_runs([tmp_path])) == 5
    environment(write_run(tmp_path / "f"), code="2f", commit="a")
    environment(write_run(tmp_path / "g"), commit="c0ffee", dirty=True)
    with pytest.raises(ConfigError) as error:
        load_runs([tmp_path])
    assert str(error.value).splitlines()[:4] == [
        "these runs come from 3 versions of the code:",
        "  code 1f: a, b, c and 2 more",
        "  code 2f: f",
        "  code of commit c0ffee with changes: g",
    ]
    assert len(load_runs([tmp_path], mixed_code=True)) == 7
    with pytest.raises(ConfigError, match="3 versions"):
        collect_runs([str(tmp_path), "--out", str(tmp_path / "out")])
    collect_runs([str(tmp_path), "--out", str(tmp_path / "out"), "--mixed-code"])
    assert load_run(tmp_path / "a").device == "unknown"


def test_a_run_whose_steps_two_versions_made_is_two_versions(tmp_path: Path) -> None:
    """As env.json says of the attempts before the last one; a committed study keeps it."""
    torch = {"torch": "2.12"}
    first = {
        "after": 0,
        "code": "1f",
        "packages": torch,
        "device": "cpu",
        "cpu": "an old one",
        "own_code": {"r.py": "1"},
    }
    made = {"code": "2f", "packages": torch, "device": "cpu", "cpu": "another", "own_code": {"r.py": "2"}}
    environment(write_run(tmp_path / "a"), **made, after=2, earlier=[first])
    run = load_run(tmp_path / "a")
    assert run.code == "1f, then 2f" and run.block == "cpu, an old one, torch 2.12, then cpu, another, torch 2.12"
    with pytest.raises(ConfigError, match=r"2 versions of the code:\n  code 1f: a\n  code 2f: a\n.*--mixed-code"):
        load_runs([tmp_path])
    environment(write_run(tmp_path / "b"), **made | {"code": "1f"}, after=2, earlier=[first])
    with pytest.raises(ConfigError, match=r"2 versions of r.py"):
        load_runs([tmp_path / "b"])
    collect_runs([str(tmp_path), "--out", str(tmp_path / "out"), "--mixed-code"])
    with pytest.raises(ConfigError, match="2 versions of the code"):
        load_runs([tmp_path / "out"])


def test_runs_with_two_versions_of_a_users_own_file_are_refused_unless_that_is_known(tmp_path: Path) -> None:
    for name, own in {"a": {"spelling.py": "1f"}, "b": {}, "c": {"spelling.py": "1f", "other.py": "3f"}}.items():
        environment(write_run(tmp_path / name), code="x", own_code=own)
    assert len(load_runs([tmp_path])) == 3
    environment(write_run(tmp_path / "d"), code="x", own_code={"spelling.py": "2f"})
    with pytest.raises(ConfigError) as error:
        load_runs([tmp_path])
    assert str(error.value).splitlines()[1:3] == ["  1f: a, c", "  2f: d"] and "spelling.py" in str(error.value)
    assert len(load_runs([tmp_path], mixed_code=True)) == 4


def test_a_metric_with_two_definitions_is_refused_in_any_case(tmp_path: Path) -> None:
    environment(write_run(tmp_path / "a"), metrics={"loss": "-: x", "entropy": "nats/token: of the sampler"})
    environment(write_run(tmp_path / "b"), metrics={"entropy": "nats/token: of the trainer", "kl": "-: y"})
    environment(write_run(tmp_path / "c"), metrics={"entropy": "nats/token: of the sampler", "kl": "-: y"})
    with pytest.raises(ConfigError) as error:
        load_runs([tmp_path], mixed_code=True)
    assert str(error.value).splitlines()[:3] == [
        "these runs have different definitions of entropy:",
        "  'nats/token: of the sampler': a, c",
        "  'nats/token: of the trainer': b",
    ]


def test_answers_are_shares_by_question_and_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    rows = pd.DataFrame(
        [
            ("sampled", q, s, c)
            for s, q, c in [(0, "y", True), (0, "x", False), (9, "x", True), (9, "x", False), (9, "y", True)]
        ],
        columns=["mode", "question", "step", "correct"],
    )
    rows.to_parquet(folder / "samples.parquet")
    found = load_run(folder).answers("sampled")
    assert (found.index.tolist(), found.columns.tolist()) == (["x", "y"], [0, 9])
    assert found.to_numpy().tolist() == [[0.0, 0.5], [1.0, 1.0]]
    with pytest.raises(ConfigError, match=r"samples\.parquet has no answers with mode=greedy"):
        load_run(folder).answers("greedy")
    with pytest.raises(ConfigError, match=r"samples\.parquet does not say of its answers: lenient"):
        load_run(folder).answers("sampled", "lenient")
    more = rows.assign(lenient=[True, True, False, True, True], finished=True, tokens=[4, 6, 1, 2, 9])
    more.to_parquet(folder / "samples.parquet")
    run = load_run(folder)
    assert run.answers("sampled", "lenient").to_numpy().tolist() == [[1.0, 0.5], [1.0, 1.0]]
    assert run.answers("sampled", "tokens").to_numpy().tolist() == [[6.0, 1.5], [4.0, 9.0]]
    more.assign(lenient=[True, None, False, True, True]).to_parquet(folder / "samples.parquet")
    with pytest.raises(ConfigError, match="lenient"):  # a gold answer that is no number
        load_run(folder).answers("sampled", "lenient")
    rows.drop(columns=["correct", "step"]).to_parquet(folder / "samples.parquet")
    with pytest.raises(ConfigError, match=r"a/samples\.parquet has no column correct, step"):
        load_run(folder).answers("sampled")
    with pytest.raises(ConfigError, match="is missing"):
        load_run(write_run(tmp_path / "b")).answers("sampled")


def test_collecting_runs_costs_little_more_than_reading_their_json(tmp_path: Path) -> None:
    """In processor time, best of three, beside `json.loads` of the same lines: a slow machine slows both."""
    names = [*definitions.ROLLOUT, *definitions.TRAIN]
    lines = [
        {"kind": "train", "step": step, **{name: 1 / (step + place) for place, name in enumerate(names)}}
        for step in range(1, 1001)
    ]
    paths = [write_run(tmp_path / "runs" / f"run{number}", lines) for number in range(8)]

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    def collect() -> None:
        assert write_study(paths, tmp_path / "out", mixed_code=False)[:3] == (8, 0, 8 * 1000 * len(names))

    def parse() -> None:
        for path in paths:
            for line in (path / "metrics.jsonl").read_text().splitlines():
                json.loads(line)

    assert min(seconds(collect) for _ in range(3)) < 4 * min(seconds(parse) for _ in range(3))  # measured: 1.8 times
