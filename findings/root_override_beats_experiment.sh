#!/usr/bin/env bash
# Hydra 1.3.8: where the primary config says `override hydra/job_logging: none`, a file that it lists before, an
# experiment with `override /hydra/job_logging: default`, changes nothing, and nothing is said. The same override in a
# file of its own, listed before the experiment, is overridden as usual.
# Guessed before: what is chosen on the command line, the experiment, has the last word in both.
# So what: an experiment cannot choose launcher or sweeper of a program whose primary config has chosen one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3
cd "$folder"
mkdir -p conf/experiment
cat >app.py <<'END'
import sys

import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base=None, config_path="conf", config_name=sys.argv.pop(1))
def main(cfg):
    print(HydraConfig.get().runtime.choices["hydra/job_logging"])


main()
END
printf '# @package _global_\ndefaults:\n  - override /hydra/job_logging: default\n' >conf/experiment/loud.yaml
printf '# @package _global_\ndefaults:\n  - override /hydra/job_logging: none\n' >conf/quiet.yaml
printf 'defaults:\n  - _self_\n  - experiment: null\n  - override hydra/job_logging: none\n' >conf/direct.yaml
printf 'defaults:\n  - quiet\n  - _self_\n  - experiment: null\n' >conf/apart.yaml
direct=$("$folder/env/bin/python" app.py direct experiment=loud)
apart=$("$folder/env/bin/python" app.py apart experiment=loud)
echo "in the primary config: $direct; in a file of its own: $apart"
[[ $direct == none && $apart == default ]]
