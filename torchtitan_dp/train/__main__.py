"""`python -m torchtitan_dp.train`, one worker of `torchrun`."""

import sys

from torchtitan_dp.train.trainer import main

if __name__ == "__main__":
    main(sys.argv[1:])
