"""`python -m torchtitan_dp.train`, one worker of `torchrun`."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # a fifth of the seconds of imports; TorchTitan's trainer does so anyway

# isort: split
from torchtitan_dp.base.process import leave
from torchtitan_dp.train.trainer import main

if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
