"""What kind of error each packed layer makes: scale bias, dead zone and grid noise, by layer, format and quantizer.

python analysis/error_anatomy.py runs/ --out figures/
"""

import argparse
from pathlib import Path

import pandas as pd

from qerl_bench.errors import require
from qerl_bench.results.anatomy import draw, one_of_each
from qerl_bench.results.script import guarded
from qerl_bench.results.style import save


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw error_anatomy.pdf and .png of runs or exports.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders searched for layers.parquet")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    options = parser.parse_args(arguments)
    files = [file for folder in options.folders for file in sorted(folder.rglob("layers.parquet"))]
    searched = ", ".join(map(str, options.folders))
    require(len(files) > 0, f"no layers.parquet in {searched}: give folders of runs or exports")
    table = pd.concat([pd.read_parquet(file).assign(file=str(file)) for file in files]).query("relative_error > 0")
    print(*save(draw(one_of_each(table)), options.out / "error_anatomy"), sep="\n")


if __name__ == "__main__":
    guarded(main)
