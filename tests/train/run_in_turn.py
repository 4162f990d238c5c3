"""Several training runs, one after the other, in the same processes: megatron.core takes ten seconds to import.

torchrun --nproc-per-node 2 run_in_turn.py '[["data.path=a", "output=b"], ...]' PORT PORT ...
"""

from __future__ import annotations

import json
import os
import sys

from megatron_packed_sft.train.app import main

if __name__ == "__main__":
    # torchrun's own store remembers where the ranks of the run before listened; each run gets a store of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for arguments, port in zip(json.loads(sys.argv[1]), sys.argv[2:], strict=True):
        os.environ["MASTER_PORT"] = port
        code = main(arguments)
        if code:
            sys.exit(code)
