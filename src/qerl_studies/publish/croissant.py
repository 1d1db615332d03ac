"""A study in Croissant 1.0, the format of MLCommons for describing data sets to machines, with its RAI vocabulary.

Croissant: https://docs.mlcommons.org/croissant/docs/croissant-spec.html, RAI: .../croissant-rai-spec.html. The RAI
properties are those that the NeurIPS 2026 track on evaluations and data sets asks for, and how the data were made.
Left out: sha256 of this file itself and of the card, which name each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from qerl_core import __version__
from qerl_core.rundir.checksums import digest
from qerl_studies.claims.registration import REGISTERED
from qerl_studies.publish.description import Description
from qerl_studies.runs.committed import ANSWERS, SETTINGS, TIDY

CROISSANT = "croissant.json"
FORMATS = {
    SETTINGS: "application/json",
    TIDY: "application/x-parquet",
    ANSWERS: "application/x-parquet",
    REGISTERED: "application/json",  # whose seal is of the claim beside it
}
SPDX = {"apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause"}  # and Creative Commons
PREFIX = "http://mlcommons.org/croissant"
# As the specification prints it: the names that a reader may expect, and the spaces they are from.
OWN = (
    "citeAs", "column", "dct:conformsTo", "data:@json", "dataType:@vocab", "equivalentProperty", "examples:@json",
    "extract", "field", "fileProperty", "fileObject", "fileSet", "format", "includes", "isLiveDataset", "jsonPath",
    "key", "md5", "parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate",
    "separator", "source", "subField", "transform",
)  # fmt: skip
SPACES = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": f"{PREFIX}/",
    "rai": f"{PREFIX}/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
}


def context() -> dict[str, Any]:
    names: dict[str, Any] = dict(SPACES)
    for entry in OWN:
        name, _, kind = entry.partition(":")
        if name == "dct":
            names[kind] = entry
        else:
            names[name] = {"@id": f"cr:{name}", "@type": kind} if kind else f"cr:{name}"
    return names


def croissant(described: Description, folder: Path) -> dict[str, Any]:
    """The JSON-LD of the study in `folder`; its files must be complete."""
    place = f"https://huggingface.co/datasets/{described.names.repo}" if described.names.repo else ""
    files = [name for name in FORMATS if (folder / name).is_file()]
    return {
        "@context": context(),
        "@type": "sc:Dataset",
        "conformsTo": [f"{PREFIX}/1.0", f"{PREFIX}/RAI/1.0"],
        "name": described.title,
        "description": described.summary,
        "version": "1.0.0",
        "datePublished": described.published.isoformat(),
        "license": license_address(described.license),
        "creator": {"@type": "sc:Person", "name": described.names.author},
        "citeAs": f"{described.names.author}: {described.title}, {described.published.year}. {place}".strip(),
        **({"url": place} if place else {}),
        "keywords": ["reinforcement learning", "quantization", "language models", "QeRL"],
        "isLiveDataset": False,
        "distribution": [_file(folder / name, place) for name in files],
        "recordSet": [_records(folder / name) for name in files if FORMATS[name] == FORMATS[TIDY]],
        **_rai(described),
    }


def license_address(name: str) -> str:
    """The page of SPDX for a name as the hub writes it, in small letters; `name` itself if that is not known."""
    spdx = name.upper() if name.startswith("cc") else SPDX.get(name)
    return name if spdx is None else f"https://spdx.org/licenses/{spdx}.html"


def _file(path: Path, place: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path.name,
        "name": path.name,
        "contentUrl": f"{place}/resolve/main/{path.name}" if place else path.name,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": FORMATS[path.name],
        "sha256": digest(path),
    }


def _records(path: Path) -> dict[str, Any]:
    """The columns of a table."""
    name = path.stem
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{name}/{field.name}",
                "name": field.name,
                "dataType": _kind(field.type),
                "source": {"fileObject": {"@id": path.name}, "extract": {"column": field.name}},
            }
            for field in parquet.read_schema(path)
        ],
    }


def _kind(column: pa.DataType) -> str:
    if pa.types.is_boolean(column):
        return "sc:Boolean"
    if pa.types.is_integer(column):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(column) else "sc:Text"


def _rai(described: Description) -> dict[str, Any]:
    times = sorted(t for run in described.runs for kind in ("eval", "train") for t in run.series(kind, "time").tolist())
    models, tasks = (", ".join(described.values(key)) for key in ("model.name", "task.name"))
    collected = sorted({_day(times[0]), _day(times[-1])}) if times else [described.published.isoformat()]
    return {
        "rai:dataCollection": (
            f"QeRL-Bench {__version__} trained {models} on {tasks} and wrote each number while it ran; cost: "
            f"{described.cost}."
        ),
        "rai:dataCollectionType": ["Experiments"],
        "rai:dataCollectionTimeFrame": collected,
        "rai:dataPreprocessingProtocol": "None but the choice of metrics: every number is as the run wrote it.",
        "rai:dataLimitations": (
            f"{len(described.runs)} runs with {len({run.base for run in described.runs})} base models on {tasks}: they "
            "say nothing of other models or tasks. Times and memory hold for the machines that are named."
        ),
        "rai:dataBiases": "Models, tasks and options were chosen by the authors; failed runs are not included.",
        "rai:personalSensitiveInformation": (
            "None. Texts are not included; names of users, machines and folders were taken out."
        ),
        "rai:dataUseCases": "To test claims about reinforcement learning on quantized weights, and to repeat the runs.",
        "rai:dataSocialImpact": (
            "Cheaper training of language models is within reach of more people, whatever they use it for."
        ),
        "rai:hasSyntheticData": True,
        "rai:dataReleaseMaintenancePlan": "As published; a corrected study is a new version.",
        "prov:wasDerivedFrom": described.sources,
        "prov:wasGeneratedBy": f"QeRL-Bench {__version__}: {', '.join(sorted({run.code for run in described.runs}))}",
    }


def _day(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
