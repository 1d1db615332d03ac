"""Photographs the first screen of the report of a committed study for README.md, in Debian's Chromium.

python docs/pictures/page.py     # docs/pictures/report.webp, under 60 KB; Chromium as `make test-page` installs it
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "studies" / "real-2026" / "15b"
PICTURE = Path(__file__).with_name("report.webp")
WIDTH, HEIGHT, COLORS = 1100, 1075, 48  # pixels: down to the first two curves


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no Chromium: make test-page installs Debian's")
    with tempfile.TemporaryDirectory() as folder:
        report = [sys.executable, "-m", "qerl_bench", "report", str(STUDY), f"out={folder}"]
        subprocess.run(report, cwd=ROOT, check=True)
        shot = Path(folder) / "shot.png"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = f"--window-size={WIDTH},{HEIGHT + 200}"
        page = (Path(folder) / "index.html").as_uri()
        subprocess.run([browser, *flags, size, f"--screenshot={shot}", page], check=True, stderr=subprocess.DEVNULL)
        whole = Image.open(shot).convert("RGB").crop((0, 0, WIDTH, HEIGHT))
        small = whole.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).convert("RGB")
        small.save(PICTURE, lossless=True, quality=100, method=6)
    print(PICTURE, f"{PICTURE.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
