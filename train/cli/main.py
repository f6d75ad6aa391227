"""The command line: `draftsmith train | evaluate | generate | export | inspect` and more."""

from train.cli import app


def main() -> None:
    """The entry point of the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
