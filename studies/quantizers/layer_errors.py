"""Error of each packed layer, in weights and outputs, by format and quantizer: layers.parquet.

python studies/quantizers/layer_errors.py model=tiny --out studies/quantizers/data

Arguments such as model=tiny are options of a run, and --config-dir DIR a folder of one's own
options, formats among them. Outputs are those of the calibration text of awq and gptq.
`qerl-bench figure error_decomposition` draws the table.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_bench.config import build, compose
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibration import Calibration
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.hidden_packages import hidden_packages


@dataclass(frozen=True)
class WithText:
    """`quantizer` with a calibration text, so that the output errors of its layers are measured."""

    quantizer: Quantizer
    calibration: Calibration

    def __getattr__(self, name: str) -> Any:
        return getattr(self.quantizer, name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="options of a run, such as model=tiny")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument(
        "--formats", nargs="+", default=["nvfp4", "mxfp4", "nf4"], help="weight formats (default: 4 bits)"
    )
    parser.add_argument(
        "--quantizers", nargs="+", default=["rtn", "mse", "awq", "gptq"], help="quantizers (default: all)"
    )
    words = user_options.with_search_path(sys.argv[1:] if arguments is None else arguments)
    user_options.use(user_options.folders_in(words))
    own, words = user_options.split_search_path(words)
    given = parser.parse_args(words)
    options = [*given.options, *own]
    with hidden_packages():
        from qerl_bench.model.load import load_packed
        from qerl_bench.model_setup import base_checkpoint
        from qerl_bench.quant.error_decomposition import write_layers
        from qerl_core.process.device import resolve_device
    given.out.mkdir(parents=True, exist_ok=True)
    text = build(compose([*options, "quant=nvfp4", "quantizer=awq"])).quantizer.calibration
    assert text is not None
    tables = []
    for quant, quantizer in product(given.formats, given.quantizers):
        experiment = build(compose([*options, f"quant={quant}", f"quantizer={quantizer}"]))
        base = base_checkpoint(experiment.model, experiment.task, experiment.root)
        with_text: Any = WithText(experiment.quantizer, text)
        device = resolve_device(experiment.device)
        layers = load_packed(experiment.model, experiment.quant, with_text, experiment.task, base, device).layers
        write_layers(given.out / "layers.parquet", layers, quant, quantizer)
        tables.append(pd.read_parquet(given.out / "layers.parquet"))
    pd.concat(tables).to_parquet(given.out / "layers.parquet", index=False, compression="zstd")


if __name__ == "__main__":
    guarded(main)
