#!/usr/bin/env bash
# peft 0.21.2: the adapter_config.json of one LoraConfig lists its target_modules in the order of a Python set, so equal
# adapters have other bytes in each process, unless PYTHONHASHSEED is set.
# Guessed before: in the order that was given, or sorted.
# So what: a digest of a saved adapter's folder says nothing; leave the config out, or compare its parsed values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
for seed in 0 1 0; do
    PYTHONHASHSEED=$seed "$folder/env/bin/python" - "$folder/$seed" <<'END'
import json
import pathlib
import sys

from peft import LoraConfig

names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LoraConfig(r=4, target_modules=names).save_pretrained(sys.argv[1])
saved = json.loads(pathlib.Path(sys.argv[1], "adapter_config.json").read_text())["target_modules"]
print(saved)
assert set(saved) == set(names) and saved not in (names, sorted(names))
END
    sha256sum <"$folder/$seed/adapter_config.json" >>"$folder/digests"
done
test "$(sort -u "$folder/digests" | wc -l)" = 2 && test "$(sed -n 1p "$folder/digests")" = "$(sed -n 3p "$folder/digests")"
