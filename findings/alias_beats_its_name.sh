#!/usr/bin/env bash
# torch 2.13.0: PYTORCH_CUDA_ALLOC_CONF, "only for backward compatibility" an alias of PYTORCH_ALLOC_CONF, is the one that is
# read if both are set, also if it is empty. The header c10/core/AllocatorConfig.h gives the alias the lower priority.
# Guessed before: the new name wins, and an empty variable counts as none.
# So what: where an image or a launcher exports the old name, options under the new one do nothing, and no word is said.
# Measured in a build for CPUs, which reads the variables too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
read_by_torch() {
    env -u PYTORCH_CUDA_ALLOC_CONF -u PYTORCH_ALLOC_CONF "$@" "$folder/env/bin/python" -c \
        'import torch; print(torch._C._accelerator_getAllocatorSettings())'
}
new=$(read_by_torch PYTORCH_ALLOC_CONF=max_split_size_mb:128)
both=$(read_by_torch PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 PYTORCH_ALLOC_CONF=max_split_size_mb:128 2>"$folder/words")
empty=$(read_by_torch PYTORCH_CUDA_ALLOC_CONF= PYTORCH_ALLOC_CONF=max_split_size_mb:128 2>>"$folder/words")
echo "the new name alone: '$new'; both: '$both'; both, the old one empty: '$empty'"
cat "$folder/words"
test "$new" = max_split_size_mb:128 && test "$both" = max_split_size_mb:64 && test -z "$empty" && test ! -s "$folder/words"
