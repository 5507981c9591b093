"""`python -m plait`: the command line."""

from plait.cli import main

if __name__ == "__main__":
    main()
