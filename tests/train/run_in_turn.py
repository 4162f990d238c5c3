"""Several training runs, one after the other, in the same processes: megatron.core takes ten seconds to import.

torchrun --nproc-per-node 2 run_in_turn.py '[["data.path=a", "output=b"], ...]'
"""

from __future__ import annotations

import json
import sys

from megatron_packed_sft.train.app import main

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        code = main(arguments)
        if code:
            sys.exit(code)
