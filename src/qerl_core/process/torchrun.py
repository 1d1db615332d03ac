"""What a process that torchrun has started tells it when it ends in an error that has words."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun, as torch.distributed.elastic.multiprocessing.errors says


def tell_torchrun(file: Path, message: str) -> None:
    """Make `message` the root cause in torchrun's report, which looks for it in the `file` of this rank."""
    told = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}  # without py_callstack, a traceback
    with suppress(OSError):
        file.write_text(json.dumps({"message": told}))
