"""All claims by family: `qerl`, those of QeRL; `literature`, `frontier` and `rounded`, of later papers; one's own.

A family is corrected for its own number, so what one has changes no verdict of another. The files of the project are
conf/claim/NAME.yaml, those of a folder of one's own (--config-dir DIR) DIR/claim/NAME.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from qerl_core.checks import require
from qerl_core.options import user_options
from qerl_core.options.composer import Composer
from qerl_core.options.files import options_of
from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.claim import Claim
from qerl_studies.claims.read import GROUP, read_claim

QERL = "qerl"  # the family that pages of runs show, with one's own
SHARED = "shared/"  # what claims take values from


def families() -> dict[str, tuple[Claim, ...]]:
    """The claims of each family by their numbers, QeRL's first and those of one's own last.

    Raises ConfigError for a file with a wrong value, and for two claims with one place in a family or one title.
    """
    found: dict[str, list[Claim]] = {QERL: []}
    for claim in (*_of_project(), *own_claims()):
        found.setdefault(claim.family, []).append(claim)
    return {family: _in_order(family, claims) for family, claims in found.items()}


def claims_of(family: str) -> tuple[Claim, ...]:
    return families()[family]


def own_claims() -> tuple[Claim, ...]:
    """The claims of folders of one's own."""
    return _of_own(tuple(user_options.folders()))


def shown_claims() -> tuple[Claim, ...]:
    """What pages of runs show: the claims of QeRL, then one's own."""
    return (*claims_of(QERL), *own_claims())


def with_own_folders(words: Sequence[str] | None) -> list[str]:
    """The words of a command without the folders of --config-dir, which are in use from now on."""
    search_path, others = user_options.split_search_path(sys.argv[1:] if words is None else words)
    if search_path:
        Composer().tree(search_path)
    return others


@lru_cache
def _of_project() -> tuple[Claim, ...]:
    return tuple(read_claim([CONF_DIR], name) for name in _names([CONF_DIR]))


@lru_cache
def _of_own(folders: tuple[Path, ...]) -> tuple[Claim, ...]:
    names, taken = _names(folders[1:]), {claim.family for claim in _of_project()}
    claims = {name: read_claim(folders, name) for name in names}
    for name, claim in claims.items():
        require(
            claim.family not in taken,
            f"{options_of(folders, GROUP)[name]}: family={claim.family} is the project's, and another claim would "
            "change its verdicts; call your own family otherwise",
        )
    return tuple(claims.values())


def _names(folders: Sequence[Path]) -> list[str]:
    return [name for name in options_of(folders, GROUP) if not name.startswith(SHARED)]


def _in_order(family: str, claims: Iterable[Claim]) -> tuple[Claim, ...]:
    by_number = sorted(claims, key=lambda claim: claim.number)
    for what in ("number", "title"):
        values = [getattr(claim, what) for claim in by_number]
        twice = {value for value in values if values.count(value) > 1}
        require(not twice, f"several claims of the family {family} have {what}={twice}: give each its own")
    return tuple(by_number)
