"""``python -m torchcaps``, for torchrun and if the command is not on the path."""

from torchcaps.cli import main

if __name__ == "__main__":
    main()
