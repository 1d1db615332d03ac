"""Make a finished run, or a study of many, ready for others: as a folder, or at the Hugging Face hub.

    qerl-bench publish runs/NAME out=DIR                   # a run: its adapter and a model card
    qerl-bench publish runs/ out=DIR author="A. Lovelace"  # a study: numbers, card, metadata
    qerl-bench publish runs/ to=hub repo=OWNER/NAME        # send it, after `hf auth login`

A study is a folder of finished runs, or a committed one. Paths, names of the user and the machine, and keys are taken
out of every file; what the cards say comes from the runs. Nothing leaves this machine unless to=hub is given.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from qerl_core.checks import require
from qerl_core.process.arguments import KeyValueParser, output_folder
from qerl_studies.design.looks import shown_runs
from qerl_studies.publish.adapter import write_adapter
from qerl_studies.publish.dataset import write_dataset
from qerl_studies.publish.folder import Names, check_private, check_target, listing
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.private import Private

NEW_REPO = "repo=OWNER/NAME"


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("source", type=Path, help="a run, a folder of runs, or a committed study")
    parser.add_argument("--to", choices=("folder", "hub"), default="folder", help="where to (default: folder)")
    parser.add_argument(
        "--out",
        type=output_folder,
        help="folder to write, whose name is the title (default: published/NAME of the source)",
    )
    parser.add_argument("--repo", help=f"at the hub, {NEW_REPO}; made, for others to see, if there is none")
    parser.add_argument("--author", default="Anonymous", help="who made the runs (default: Anonymous, as for a review)")
    licence = "as the hub writes it (default: cc-by-4.0 for a study; for an adapter that of the base, which you state)"
    parser.add_argument("--license", help=f"licence, {licence}")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    given = parser.parse_args(words)
    require(given.to == "hub" or given.repo is None, f"repo={given.repo} needs to=hub; for a folder give out=DIR")
    require(given.to == "folder" or given.repo is not None, f"to=hub needs {NEW_REPO}, the place at the hub")
    require(
        given.repo is None or given.repo.count("/") == 1,
        f"repo must be OWNER/NAME, as in repo=ada/nvfp4-study, got {given.repo!r}",
    )
    require(
        given.source.exists() or given.source.parent.exists(), f"{given.source} is not there: give a run or a study"
    )
    is_run = (given.source / "config.yaml").is_file()
    require(
        shown_runs([given.source]) == find_runs(given.source),
        f"{given.source} has runs that no look at the study's primary contrasts sees: publish it after its last look",
    )
    sender = None
    if given.repo is not None:
        from qerl_studies.publish.hub import Sender

        sender = Sender.logged_in(given.repo, "model" if is_run else "dataset")  # before anything is written
    out = given.out or Path("published", given.source.resolve().name)
    check_target(out, given.source)
    names = Names(given.repo or out.resolve().name, given.author, given.license, given.repo)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as place:
        folder = Path(place, "content")
        folder.mkdir()
        private = Private.here()
        if is_run:
            write_adapter(given.source, folder, names, private)
        else:
            write_dataset(given.source, folder, names, private, given.mixed_code)
        check_private(folder, private)
        folder.rename(out)
    print("\n".join(listing(out)))
    if sender is None:
        print("\nNothing was sent. To send these files: the same command with to=hub repo=OWNER/NAME")
    else:
        print(f"\nsent: {sender.send(out)}")
