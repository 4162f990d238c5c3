"""Several training runs, one after the other, in the same processes: megatron.core takes ten seconds to import.

torchrun --nproc-per-node 2 run_in_turn.py '[["data.path=a", "output=b"], ...]'

A run whose last argument is --sigterm-after=5 gets that signal, on its first rank, when it has written five steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from megatron_packed_sft.train.app import main

_SIGTERM_AFTER = "--sigterm-after="


def send_sigterm(metrics: Path, num_lines: int) -> None:
    """Wait until a run has written so many lines, and ask it to stop."""
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        if arguments[-1].startswith(_SIGTERM_AFTER):
            num_lines = int(arguments.pop().removeprefix(_SIGTERM_AFTER))
            [output] = [one.removeprefix("output=") for one in arguments if one.startswith("output=")]
            if os.environ.get("RANK", "0") == "0":
                waiting = (Path(output) / "metrics.jsonl", num_lines)
                threading.Thread(target=send_sigterm, args=waiting, daemon=True).start()
        code = main(arguments)
        if code:
            sys.exit(code)
