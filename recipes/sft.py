"""Train on packed SFT data: torchrun --nproc-per-node 2 recipes/sft.py packed_storage=memmap_v1 data.path=my_dataset"""

import sys

from megatron_packed_sft.train.app import main

if __name__ == "__main__":
    sys.exit(main())
