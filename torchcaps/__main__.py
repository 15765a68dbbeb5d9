"""``python -m torchcaps``, where the command is not on the path, and for torchrun."""

from torchcaps.cli import main

if __name__ == "__main__":
    main()
