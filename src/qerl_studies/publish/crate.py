"""A study as an RO-Crate 1.1 (https://w3id.org/ro/crate/1.1): metadata that archives such as Zenodo read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qerl_core import __version__
from qerl_studies.claims.registration import registered_files
from qerl_studies.publish.croissant import CROISSANT, FORMATS, license_address
from qerl_studies.publish.description import Description
from qerl_studies.publish.folder import HOMEPAGE

CRATE = "ro-crate-metadata.json"
ALL_FORMATS = FORMATS | {CROISSANT: "application/ld+json", "README.md": "text/markdown"}


def crate(described: Description, folder: Path) -> dict[str, Any]:
    """The JSON-LD of the study in `folder`: the files, who made them, and the software that did."""
    formats = ALL_FORMATS | {name: "application/yaml" for name in registered_files(folder) if name not in ALL_FORMATS}
    files = [name for name in formats if (folder / name).is_file()]
    address = license_address(described.license)
    licence = address if "://" in address else "#licence"
    author, software = {"@id": "#author"}, {"@id": "#qerl-bench"}
    return {
        "@context": "https://w3id.org/ro/crate/1.1/context",
        "@graph": [
            {
                "@id": CRATE,
                "@type": "CreativeWork",
                "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
                "about": {"@id": "./"},
            },
            {
                "@id": "./",
                "@type": "Dataset",
                "name": described.title,
                "description": described.summary,
                "datePublished": described.published.isoformat(),
                "license": {"@id": licence},
                "author": author,
                "mentions": {"@id": "#runs"},
                "hasPart": [{"@id": name} for name in files],
            },
            *(
                {
                    "@id": name,
                    "@type": "File",
                    "name": name,
                    "encodingFormat": formats[name],
                    "contentSize": str((folder / name).stat().st_size),
                }
                for name in files
            ),
            {"@id": "#author", "@type": "Person", "name": described.names.author},
            {"@id": licence, "@type": "CreativeWork", "name": described.license, "description": "licence of the data"},
            {
                "@id": "#qerl-bench",
                "@type": "SoftwareApplication",
                "name": "QeRL-Bench",
                "version": __version__,
                "url": HOMEPAGE,
            },
            {
                "@id": "#runs",
                "@type": "CreateAction",
                "name": f"{len(described.runs)} runs",
                "description": f"Cost: {described.cost}",
                "instrument": software,
                "agent": author,
                "object": [{"@id": address} for address in described.sources],
                "result": [{"@id": name} for name in files],
            },
            *({"@id": address, "@type": "CreativeWork", "name": address} for address in described.sources),
        ],
    }
