"""`qerl-bench publish` and `check`: what the folders hold, that nothing private is in them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file

from qerl_core.checks import ConfigError
from qerl_core.rundir.checksums import digest
from qerl_studies.commands import check
from qerl_studies.commands import publish as command
from qerl_studies.publish.crate import CRATE
from qerl_studies.publish.croissant import CROISSANT, license_address
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import load_run
from qerl_studies.runs.private import Private

ASSETS = Path(__file__).parents[1] / "assets" / "runs"
TOKEN = "hf_" + "aB3" * 12
SECRETS = ("/home/alice", "alice", "node-17", TOKEN)


@pytest.fixture(autouse=True)
def alice(monkeypatch: pytest.MonkeyPatch) -> None:
    alice = Private("alice", "node-17.example.org")
    monkeypatch.setattr(Private, "here", lambda: alice)


def publish(source: Path, out: Path, *words: str) -> Path:
    command.main([str(source), f"out={out}", *words])
    return out


def edited(run: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a YAML or JSON file of a run."""
    content = yaml.load((run / name).read_text(), yaml.CSafeLoader)
    change(content)
    text = json.dumps(content) if name.endswith("json") else yaml.dump(content, Dumper=yaml.CSafeDumper)
    (run / name).write_text(text)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Eight runs in which somebody has left private things."""
    runs = tmp_path / "runs"
    shutil.copytree(ASSETS, runs)
    private = {"path": "/home/alice/data/questions.jsonl", "note": f"{TOKEN} of alice"}
    for run in runs.iterdir():
        edited(run, "config.yaml", lambda config: config["task"].update(private))
        edited(
            run, "env.json", lambda env: env.update(own_code={"/home/alice/mine/halving.py": "0f0f0f"}, cpu="node-17")
        )
    return runs


def texts(folder: Path) -> str:
    return "\n".join(file.read_bytes().decode(errors="replace") for file in sorted(folder.rglob("*")) if file.is_file())


def test_a_study_has_its_numbers_and_nothing_private(study: Path, tmp_path: Path) -> None:
    out = publish(study, tmp_path / "out", "author=Ada", "license=mit")
    assert not [secret for secret in SECRETS if secret in texts(out)]
    published, runs = load_runs([out]), load_runs([study])
    assert [run.name for run in published] == [run.name for run in runs]
    entropies = [[run.series("train", "entropy").tolist() for run in group] for group in (published, runs)]
    assert entropies[0] == entropies[1] and len(entropies[0][0]) > 1
    assert published[0].option("task.path") == "<path>/questions.jsonl"
    assert check.check_study(out) == "8 runs of 4 settings, complete"
    card = (out / "README.md").read_text()
    hours = sum(run.done["wall_s"] for run in runs) / 3600
    assert "license: mit" in card and f"{hours:.3g} h" in card and card.count("| 2, 2 seeds |") == 4


def test_both_kinds_of_metadata_describe_the_files(study: Path, tmp_path: Path) -> None:
    out = publish(study, tmp_path / "out", "author=Ada")
    described = json.loads((out / CROISSANT).read_text())
    assert described["conformsTo"] == ["http://mlcommons.org/croissant/1.0", "http://mlcommons.org/croissant/RAI/1.0"]
    assert {file["name"]: file["sha256"] for file in described["distribution"]} == {
        name: digest(out / name) for name in ("settings.json", "tidy.parquet")
    }
    required = ("name", "description", "license", "creator", "datePublished", "distribution", "recordSet")
    rai = ("dataLimitations", "dataBiases", "personalSensitiveInformation", "dataUseCases", "dataSocialImpact")
    assert all(described[key] for key in (*required, *(f"rai:{key}" for key in rai)))
    assert described["rai:dataCollectionTimeFrame"] == days_of(load_runs([study]))
    (records,) = described["recordSet"]
    kinds = {field["name"]: field["dataType"] for field in records["field"]}
    assert (kinds["run"], kinds["step"], kinds["value"], kinds["finished"]) == (
        "sc:Text", "sc:Integer", "sc:Float", "sc:Boolean",
    )  # fmt: skip
    graph = {entity["@id"]: entity for entity in json.loads((out / "ro-crate-metadata.json").read_text())["@graph"]}
    root = graph["./"]
    assert graph["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    assert graph["ro-crate-metadata.json"]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert root["datePublished"] and root["name"] == "out" and graph[root["license"]["@id"]]
    assert {part["@id"] for part in root["hasPart"]} == {p.name for p in out.iterdir()} - {"ro-crate-metadata.json"}
    files = [entity for entity in graph.values() if entity["@type"] == "File"]
    assert {file["@id"]: int(file["contentSize"]) for file in files} == {
        file["@id"]: (out / file["@id"]).stat().st_size for file in files
    }

    def references(value: Any) -> list[str]:
        if isinstance(value, list):
            return [one for part in value for one in references(part)]
        return [value["@id"]] if isinstance(value, dict) and value.keys() == {"@id"} else []

    named = [one for entity in graph.values() for value in entity.values() for one in references(value)]
    assert {*named} - {"https://w3id.org/ro/crate/1.1"} <= graph.keys()


def days_of(runs: list[Any]) -> list[str]:
    """The first and the last day on which these runs wrote numbers; one if they are the same."""
    times = [time for run in runs for kind in ("eval", "train") for time in run.series(kind, "time")]
    return sorted({datetime.fromtimestamp(time, UTC).date().isoformat() for time in (min(times), max(times))})


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of mlcroissant itself
def test_mlcroissant_reads_the_records(study: Path, tmp_path: Path) -> None:
    mlc = pytest.importorskip("mlcroissant", reason="pip install mlcroissant")
    out = publish(study, tmp_path / "out", "author=Ada")
    dataset = mlc.Dataset(str(out / CROISSANT))
    counts = {table.uuid: len([*dataset.records(table.uuid)]) for table in dataset.metadata.record_sets}
    assert counts == {path.stem: parquet.read_metadata(path).num_rows for path in out.glob("*.parquet")}
    assert counts["tidy"] == sum(len(run.metrics) for run in load_runs([out]))
    read = [time.date().isoformat() for time in dataset.metadata.data_collection_timeframe]
    assert sorted(read) == days_of(load_runs([study]))


def test_no_address_is_made_up_for_a_licence(study: Path, tmp_path: Path) -> None:
    addresses = {name: license_address(name) for name in ("cc-by-4.0", "apache-2.0", "odc-by", "https://a.org/l")}
    assert addresses["cc-by-4.0"].endswith("/CC-BY-4.0.html") and addresses["apache-2.0"].endswith("/Apache-2.0.html")
    assert addresses["odc-by"] == "odc-by" and addresses["https://a.org/l"] == "https://a.org/l"
    graph = json.loads((publish(study, tmp_path / "out", "license=odc-by") / CRATE).read_text())["@graph"]
    assert {"@id": "#licence", "@type": "CreativeWork", "name": "odc-by"}.items() <= next(
        entity for entity in graph if entity["@id"] == "#licence"
    ).items()


def test_an_adapter_has_a_card_that_the_hub_can_read(runs: Any, tmp_path: Path) -> None:
    run = runs.copy("finished", tmp_path / "run")
    out = publish(run, tmp_path / "out")
    last = run / "checkpoints" / "step_000006" / "adapter"
    here, there = (load_file(folder / "adapter_model.safetensors") for folder in (out, last))
    assert here.keys() == there.keys() and all((here[name] == there[name]).all() for name in here)
    card = ModelCard.load(out / "README.md")
    assert isinstance(card.data, ModelCardData)
    loaded = load_run(run)
    scores = {result.metric_name: result.metric_value for result in card.data.eval_results or []}
    assert scores["accuracy, greedy"] == loaded.series("eval", "eval/accuracy_greedy").iloc[-1]
    assert scores["gain over the base, sampled"] == loaded.series("eval", "eval/gain_sampled").iloc[-1]
    assert card.data.library_name == "peft" and card.data.get("base_model") is None
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert "root" not in config and "logger" not in config and config["seed"] == loaded.option("seed")
    assert f"seed | {config['seed']} |" in card.text and loaded.identity()["fingerprint"] in card.text
    assert str(tmp_path) not in texts(out)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        command.main([*words])
    return str(error.value)


def test_runs_that_cannot_be_published(runs: Any, study: Path, tmp_path: Path) -> None:
    out = f"out={tmp_path / 'out'}"
    unfinished = runs.copy("unfinished", tmp_path / "unfinished")
    assert "continues" in refused(str(unfinished), out)
    (next(study.iterdir()) / "done.json").unlink()
    assert "1 of 8 runs" in refused(str(study), out)
    full = shutil.copytree(next(ASSETS.iterdir()), tmp_path / "full")
    edited(full, "config.yaml", lambda config: config["lora"].update(name="none", rank=0))
    assert "lora=none" in refused(str(full), out)
    assert "no checkpoint" in refused(str(next(ASSETS.iterdir())), out)
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".out*")]


def test_several_versions_of_the_code_need_a_word(study: Path, tmp_path: Path) -> None:
    edited(next(study.iterdir()), "env.json", lambda env: env.update(code="other"))
    assert "2 versions of the code" in refused(str(study), f"out={tmp_path / 'out'}")
    assert publish(study, tmp_path / "out", "mixed_code=true").is_dir()


def test_places_that_cannot_be_used(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "exists" in refused(str(study), f"out={tmp_path}")
    assert "counted among" in refused(str(study), f"out={study / 'new'}")
    assert "to=hub" in refused(str(study), "repo=ada/x")
    assert "OWNER/NAME" in refused(str(study), "to=hub", "repo=x")
    assert "repo=" in refused(str(study), "to=hub")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", not_logged_in)
    assert "hf auth login" in refused(str(study), "to=hub", "repo=ada/x", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def not_logged_in(self: Any) -> dict[str, Any]:
    from huggingface_hub.errors import LocalTokenNotFoundError

    raise LocalTokenNotFoundError("Token is required")


def test_the_hub_gets_the_folder(
    study: Path, tmp_path: Path, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi

    calls: list[tuple[str, Any]] = []

    def upload(self: Any, **more: Any) -> str:
        calls.append(("upload", more))
        return "https://hub/commit"

    stand_in(HfApi, whoami=lambda self: {"name": "ada"}, upload_folder=upload)
    stand_in(HfApi, create_repo=lambda self, repo, **more: calls.append((repo, more)))
    out = publish(study, tmp_path / "out", "to=hub", "repo=ada/study")
    (repo, made), (_, sent) = calls
    assert (repo, made["repo_type"]) == ("ada/study", "dataset")
    assert (sent["repo_id"], sent["folder_path"], sent["repo_type"]) == ("ada/study", out, "dataset")
    assert "sent: https://hub/commit" in capsys.readouterr().out
    described = json.loads((out / CROISSANT).read_text())
    assert described["url"] == "https://huggingface.co/datasets/ada/study"
    assert all(file["contentUrl"].startswith(described["url"]) for file in described["distribution"])


def test_what_cannot_be_hidden_is_refused(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mail"):
        publish(study, tmp_path / "out", "author=Ada ada@lab.example.com")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "tidy.parquet").write_text("x"), ("tidy.parquet", "changed")),
        (lambda folder: (folder / "README.md").unlink(), ("README.md", "missing")),
        (lambda folder: reseal(folder, '"steps": 10', '"steps": 11'), ("fingerprint",)),
        (lambda folder: reseal(folder, '"finished": true', '"finished": false'), ("not finished",)),
        (lambda folder: reseal(folder, '"torch"', '"tarch"'), ("torch", "Run it again")),
        (lambda folder: edited(folder, CROISSANT, lambda one: one.pop("license")), ("license",)),
    ],
)
def test_damaged_studies_are_refused(
    study: Path, tmp_path: Path, damage: Callable[[Path], Any], words: tuple[str, ...]
) -> None:
    out = publish(study, tmp_path / "out", "author=Ada")
    check.main([str(out)])
    damage(out)
    with pytest.raises(ConfigError) as error:
        check.main([str(out)])
    assert all(word in str(error.value) for word in words), error.value


def reseal(folder: Path, old: str, new: str) -> None:
    """Change settings.json, and its seal with it."""
    text = (folder / "settings.json").read_text()
    assert old in text
    (folder / "settings.json").write_text(text.replace(old, new))
    described = json.loads((folder / CROISSANT).read_text())
    for file in described["distribution"]:
        file["sha256"] = digest(folder / file["name"])
    (folder / CROISSANT).write_text(json.dumps(described))
