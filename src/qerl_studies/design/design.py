"""The design of a study of many bases: its arms in order of priority, their bases and seeds, as a YAML file says.

    common: [experiment=worlds/base]         # words of every run
    bases: 16                                # model.seed 0 to 15; a list of seeds, or `units` (units.py)
    seeds: 2                                 # seed 0 and 1
    arms:                                    # the first is the reference, RL in 16 bits
      bf16: {tier: 1, words: [quant=bf16]}
      hot: {tier: 1, words: [rollout.temperature=1.2], control: exploration}
      nvfp4-noise: {tier: 1, words: [quant=nvfp4, aqn=matched]}
    probe: {questions: 256, samples: 64}     # of a base, before any arm; more of it: sizes.py
    dose: {rise: 0.1, prompts: 64, draws: 8} # share by which aqn=matched raises the entropy of each base
    gates: {pass_at_1: [0.15, 0.65]}         # which are asked, and their limits, if not those of BUILT_IN (limits.py)
    primary: {...}                           # the few contrasts that it is about, if it says so (primary.py)
    judged_by: page                          # has the words of its protocol, and claims.json none (default: claims)

Tier 1 is run on all bases before tier 2 begins. A control shows that the task has a gain to be had (`gain`), or that
more exploration by known means pays in it (`exploration`); `true` is the second if its words heat the sampler or reward
entropy, otherwise the first. Reports compare an arm with itself without noise, otherwise with the reference, unless it
says `compared_with: ARM`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from qerl_core.checks import (
    Check,
    ConfigError,
    check_fields,
    count,
    one_of,
    optional,
    require,
    text,
)
from qerl_core.options.composer import Composer
from qerl_core.options.fingerprint import fingerprint, flat
from qerl_core.options.names import format_name, format_words
from qerl_core.rundir.checkpoints import is_finished
from qerl_core.sweeps.points import Point
from qerl_studies.design.limits import GateLimits, read_limits
from qerl_studies.design.primary import Primary, read_primary
from qerl_studies.design.sizes import DoseSize, ProbeSize, probe_size
from qerl_studies.design.units import Unit, read_seeds, read_units

DTYPE = "model.dtype"  # what arms of one model may differ in: training all weights needs 32 bits
EXPLORES = ("rollout.temperature=", "train.entropy_coef=")  # beginnings of the words of known means
JUDGED_BY, CLAIMS, PAGE = "judged_by", "claims", "page"
OPTIONAL = ("gates", "primary", JUDGED_BY)  # keys of a design
CONTROL = Check(lambda value: isinstance(value, bool) or value in ("gain", "exploration"), "gain, exploration or true")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The runs that differ from those of other arms in `words`."""

    name: str
    tier: int
    words: list[str]
    control: bool | str = False
    compared_with: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"arms.{self.name}", tier=count(), control=CONTROL, compared_with=optional(text))
        check_words(f"arms.{self.name}.words", self.words)

    @property
    def shows(self) -> str | bool:
        """Of a control, what it can show: gain or exploration."""
        if self.control is not True:
            return self.control
        return "exploration" if any(word.startswith(EXPLORES) for word in self.words) else "gain"

    @property
    def dosed(self) -> bool:
        """Whether its noise is matched to each base."""
        return any(word.startswith("aqn=matched") for word in self.words)


@dataclass(frozen=True, kw_only=True)
class Design:
    """A study. `bases` are numbers of `units`, which are values of model.seed unless the design says otherwise."""

    path: Path
    common: list[str]
    units: Mapping[int, Unit]
    bases: tuple[int, ...]
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    probe: ProbeSize
    dose: DoseSize
    limits: GateLimits
    primary: Primary | None

    def __post_init__(self) -> None:
        check_words("common", self.common)
        require(len(self.arms) > 0 and len(self.bases) > 0 and len(self.seeds) > 0, f"{self.path} has no runs")
        for arm in self.arms:
            others = [one.name for one in self.arms if one is not arm]
            require(
                arm.compared_with in (None, *others),
                f"arms.{arm.name}.compared_with must be one of {', '.join(others)}, got {arm.compared_with}",
            )
        asked = [flat({group: self.option(arm, group) for group in ("model", "task")}) for arm in self.arms]
        for arm, own in zip(self.arms, asked, strict=True):
            keys = sorted((own.keys() | asked[0].keys()) - {DTYPE})
            differing = [key for key in keys if own.get(key) != asked[0].get(key)]
            said = "; ".join(f"{key} is {asked[0].get(key)!r} and {own.get(key)!r}" for key in differing[:3])
            require(
                not differing,
                f"{self.reference.name} and {arm.name} of {self.path} differ in model or task ({said}): give each its "
                "own study",
            )
        named: dict[str, str] = {}  # a name says all that differs
        for arm in self.arms:
            other = named.setdefault(self.option(arm, "name"), arm.name)
            require(other == arm.name, f"{other} and {arm.name} of {self.path} make the same numbers: leave one out")
        require(
            self.option(self.reference, "algo")["name"] != "sft",
            f"the first arm of {self.path} is what gates read rollouts of: it cannot have algo=sft",
        )

    @property
    def reference(self) -> Arm:
        return self.arms[0]

    @property
    def formats(self) -> list[str]:
        """The weight formats of all arms, that of the reference first, and those that only the probe has."""
        return list(dict.fromkeys([*self.formats_of_arms, *self.probe.formats]))

    @property
    def formats_of_arms(self) -> list[str]:
        return list(dict.fromkeys(self.format_of(arm) for arm in self.arms))

    @property
    def samples_per_group(self) -> int:
        return self.option(self.reference, "rollout")["group_size"]

    @property
    def root(self) -> Path:
        """The folder with runs/, cache/ and probes/."""
        return Path(self.option(self.reference, "root"))

    def option(self, arm: Arm, key: str) -> Any:
        """What the config of an arm has under a top-level key, for the first base."""
        return self.tree(arm)[key]

    def tree(self, arm: Arm) -> dict[str, Any]:
        """The config of an arm, for the first base."""
        return self.tree_of(arm, self.bases[0])

    def tree_of(self, arm: Arm, base: int) -> dict[str, Any]:
        return _tree(*self.base_words(arm, base))

    def plain(self, quant: str) -> Arm:
        """The format alone, for a base: options of an arm, such as its temperature, would change what is compared."""
        return Arm(name=quant, tier=1, words=format_words(quant))

    def format_of(self, arm: Arm) -> str:
        return format_name(*(self.option(arm, axis)["name"] for axis in ("quant", "quantizer")))

    def base_words(self, arm: Arm, base: int) -> list[str]:
        return [*self.common, *arm.words, *self.units[base].words]

    def words(self, arm: Arm, base: int, seed: int, sigma: float | None) -> list[str]:
        """The words of one run; `sigma` is the noise that was found for its base, if the arm has matched noise."""
        unit = self.units[base]
        told = " ".join(unit.words)
        require(not arm.dosed or sigma is not None, f"{arm.name} has no dose for {told}: qerl-bench gates")
        return [
            *self.base_words(arm, base),
            f"seed={unit.seed_of(seed, len(self.seeds))}",
            *([f"aqn.sigma_of_base={sigma}"] if arm.dosed else []),
        ]

    def point(self, words: list[str]) -> Point:
        """The run with these words, unchecked."""
        tree = _tree(*words)
        run_dir = Path(tree["root"], "runs", tree["name"])
        return Point(words, tree["name"], run_dir, is_finished(run_dir))

    def probe_file(self, base: int) -> Path:
        """Where the probe of a base is kept; named by what decides its numbers, but for the formats and arms in it.

        The first format does: the others are compared with it, in a probe with details.
        """
        tree = _tree(*self.base_words(self.reference, base))
        decisive = {key: tree[key] for key in ("model", "task", "rollout", "quantizer", "engine", "kernel")}
        if self.probe.details:
            decisive["reference"] = self.formats[0]
        digest = fingerprint({**decisive, "probe": self.probe.decisive, "dose": vars(self.dose)})
        return self.root / "probes" / f"{tree['model']['name']}-{base}-{digest}.json"

    def answers_file(self, base: int, quant: str) -> Path:
        """Where the answers of a base in a weight format are kept, of a probe with details."""
        return self.probe_file(base).with_suffix("") / f"{quant}.parquet"


_composer = cache(Composer)  # one for all designs: Hydra takes a fifth of a second for the options of an arm


@lru_cache(maxsize=4096)
def _tree(*words: str) -> dict[str, Any]:
    return _composer().tree(words)


def check_words(key: str, words: object, of_units: Collection[str] = ()) -> None:
    """Raise ConfigError unless `words` are key=value words that a study, or its units, do not set themselves."""
    require(
        isinstance(words, list) and all(isinstance(word, str) and "=" in word for word in words),
        f"{key} must list key=value words, got {words!r}",
    )
    assert isinstance(words, list)
    for word in words:
        own = ("model.seed", "seed", "aqn.sigma_of_base", "root", "name", *of_units)
        set_by_study = word.partition("=")[0] in own
        require(not set_by_study, f"{key} has {word}, which the study sets for each run: leave it out")


def _first_line(error: Exception) -> str:
    """What a reader of YAML says is wrong, and where, in one line."""
    mark = getattr(error, "problem_mark", None)
    return f"{getattr(error, 'problem', error)}{f', line {mark.line + 1}' if mark else ''}"


def read_yaml(path: Path) -> Any:
    """What the YAML file of a study holds. Raises ConfigError if it is not there or no YAML."""
    require(path.is_file(), f"there is no study {path}; give its YAML file")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no study: its YAML cannot be read ({_first_line(error)}). Give a study.yaml, as "
            "qerl-bench study init=FOLDER writes one"
        ) from None


def judged_by_page(folder: Path) -> bool:
    """Whether the study in a folder says that its own page judges it."""
    content = read_yaml(folder / "study.yaml") if (folder / "study.yaml").is_file() else None
    return isinstance(content, dict) and judge_of(folder / "study.yaml", content.get(JUDGED_BY)) == PAGE


def judge_of(path: Path, given: object) -> object:
    """What judges a study whose file says `given`; None is not said. Raises ConfigError for anything else."""
    one_of(CLAIMS, PAGE)(f"{path}: {JUDGED_BY}", judge := CLAIMS if given is None else given)
    return judge


def read_design(path: Path, words: Sequence[str] = ()) -> Design:
    """The design in a YAML file; `words` are added, or replace common ones of their key. Raises ConfigError for others
    than the keys that there are, and for wrong values."""
    written = read_yaml(path)
    repeated = "units" if isinstance(written, dict) and "units" in written else "bases"
    chosen = {key: written.pop(key, None) if isinstance(written, dict) else None for key in OPTIONAL}
    judge_of(path, chosen[JUDGED_BY])
    where = f"{path}, besides {', '.join(OPTIONAL)},"
    content = _object(where, written, {"common", repeated, "seeds", "arms", "probe", "dose"})
    units = read_units(content)
    set_by_units = {word.partition("=")[0] for unit in units.values() for word in unit.words}
    check_words("common", content["common"], set_by_units)
    check_words("words", [*words], set_by_units)
    common = {word.partition("=")[0]: word for word in [*content["common"], *words]}
    arms: Any = content["arms"]
    require(isinstance(arms, dict), f"{path}: arms must have a name each")
    primary = read_primary(chosen["primary"], arms, len(units))
    return Design(
        path=path,
        common=[*common.values()],
        units=units,
        bases=tuple(units),
        seeds=read_seeds("seeds", content["seeds"]),
        arms=tuple(_arm(name, entry) for name, entry in arms.items()),
        probe=probe_size(content["probe"]),
        dose=DoseSize(**_object("dose", content["dose"], {"rise", "prompts", "draws"})),
        limits=read_limits(chosen["gates"]),
        primary=primary,
    )


def _arm(name: object, entry: object) -> Arm:
    text("arms", name)
    require(isinstance(entry, dict), f"arms.{name} must have the keys tier and words")
    assert isinstance(entry, dict)
    filled = {"control": False, "compared_with": None, **entry}
    return Arm(name=str(name), **_object(f"arms.{name}", filled, {"tier", "words", "control", "compared_with"}))


def _object(where: str, content: object, keys: set[str]) -> Mapping[str, Any]:
    given = set(content) if isinstance(content, dict) else set()
    require(given == keys, f"{where} must have exactly the keys {', '.join(sorted(keys))}, got {sorted(given)}")
    assert isinstance(content, dict)
    return content
