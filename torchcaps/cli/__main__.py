"""``python -m torchcaps.cli``, where the command is not on the path."""

from torchcaps.cli.main import main

if __name__ == "__main__":
    main()
