#!/usr/bin/env bash
# wandb 0.31.0, offline: a program makes a run, calls finish(), and starts a process that makes a run of its own. finish()
# leaves WANDB_SERVICE, a socket, in the environment, so the second run is recorded by the first program's background
# process. When the first program ends, the second one's next log() or finish() raises ConnectionResetError. After
# wandb.teardown() the variable is gone, and the second run finishes.
# Guessed before: finish() ends what init() began, and a run in a process of its own does not depend on another one.
# So what: take WANDB_SERVICE out of the environment of jobs that a notebook or a login node starts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet wandb==0.31.0
cat >"$folder/first.py" <<'END'
import os
import subprocess
import sys
import time

import wandb

folder, teardown = sys.argv[1], sys.argv[2] == "teardown"
run = wandb.init(mode="offline", project="p", dir=folder)
run.finish()
if teardown:
    wandb.teardown()
print("WANDB_SERVICE" in os.environ, flush=True)
subprocess.Popen([sys.executable, f"{folder}/second.py", folder, str(os.getpid())], start_new_session=True)
while not os.path.exists(f"{folder}/begun"):
    time.sleep(0.1)
END
cat >"$folder/second.py" <<'END'
import os
import sys
import time

import wandb

folder, first = sys.argv[1], int(sys.argv[2])
run = wandb.init(mode="offline", project="p", dir=folder, settings=wandb.Settings(console="off"))
open(f"{folder}/begun", "w").close()
while os.getppid() == first:
    time.sleep(0.1)
time.sleep(3)  # for the first program's background process to end
try:
    run.log({"a": 1})
    run.finish()
    said = "finished"
except Exception as error:
    said = type(error).__name__
with open(f"{folder}/part", "w") as file:
    file.write(said)
os.rename(f"{folder}/part", f"{folder}/said")
END
for way in finish teardown; do
    rm -f "$folder/begun" "$folder/said"
    left=$(WANDB_SILENT=true "$folder/venv/bin/python" "$folder/first.py" "$folder" "$way" 2>/dev/null | tail -n 1)
    for _ in $(seq 300); do test -e "$folder/said" && break || sleep 0.2; done
    said=$(cat "$folder/said")
    echo "after $way: WANDB_SERVICE left: $left; the second run: $said"
    case $way in
        finish) test "$left $said" = "True ConnectionResetError" ;;
        teardown) test "$left $said" = "False finished" ;;
    esac
done
