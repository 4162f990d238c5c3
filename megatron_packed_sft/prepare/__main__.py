"""`python -m megatron_packed_sft.prepare` is `packed-sft prepare`."""

import sys

from megatron_packed_sft.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
