"""`python -m draftsmith` is the command `draftsmith`."""

from draftsmith.cli.main import main

if __name__ == "__main__":
    main()
