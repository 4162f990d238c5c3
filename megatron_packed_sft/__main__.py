"""`python -m megatron_packed_sft` is `packed-sft`."""

import sys

from megatron_packed_sft.cli.main import main

sys.exit(main())
