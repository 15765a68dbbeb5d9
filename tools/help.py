"""Write torchcaps/cli/train_help.txt, the help of `torchcaps train` for a terminal of 80 columns."""

import os
import sys

if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    from torchcaps.cli.main import TRAIN_HELP
    from torchcaps.cli.train_parser import train_help

    TRAIN_HELP.write_text(train_help(), encoding="utf-8")
    sys.stdout.write(f"written to {TRAIN_HELP}\n")
