"""Train on packed SFT data: torchrun --nproc-per-node 2 recipes/sft.py data.path=my_dataset output=runs/first"""

import sys

from megatron_packed_sft.train import main

if __name__ == "__main__":
    sys.exit(main())
