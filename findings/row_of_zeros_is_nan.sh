#!/usr/bin/env bash
# optimum-quanto 0.2.7 in torch 2.13.0 on a CPU: a row of zeros in a weight comes back as NaN in its 8-bit floats, before and after
# freeze(), and as zeros in qint2, qint4 and qint8. The row is divided by its scale, 0, and only integers turn that into 0.
# Guessed before: zeros in all of them, as rows of zeros are common (padded vocabularies, pruned channels, an untrained LoRA's B).
# So what: one output of the layer is NaN for every input, and nothing is said; look for NaN after quantize(). Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet optimum-quanto==0.2.7 torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - 2>"$folder/words" <<'END' || { cat "$folder/words"; exit 1; }
import torch
from optimum.quanto import freeze, qfloat8_e4m3fn, qfloat8_e5m2, qint2, qint4, qint8, quantize

inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
for kind in (qint2, qint4, qint8, qfloat8_e4m3fn, qfloat8_e5m2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    with torch.no_grad():
        model[0].weight[3] = 0
    quantize(model, weights=kind)
    before = model(inputs).isnan()
    freeze(model)
    after, row = model(inputs).isnan(), model[0].weight.dequantize()[3]
    print(f"{kind.name}: row of zeros is {row[:3].tolist()}, NaN in outputs {after.any(dim=0).nonzero().flatten().tolist()}")
    broken = kind in (qfloat8_e4m3fn, qfloat8_e5m2)
    assert torch.equal(before, after) and after[:, 3].eq(broken).all() and after.sum() == 4 * broken
    assert row.isnan().all() if broken else row.eq(0).all()
END
