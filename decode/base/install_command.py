"""How to install an optional package: a command that works from a clone and with a wheel."""

from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """The command that installs what an extra of draftsmith needs.

    It names those packages, never draftsmith: an index may have another one of this name.

    >>> install_command("structured")
    'pip install "llguidance>=1.9.1"'
    """
    marker = f"extra == '{extra}'"
    try:
        lines = [line.partition(";") for line in requires("draftsmith") or ()]
    except PackageNotFoundError:  # a clone that was never installed
        return f'pip install ".[{extra}]" in the clone'
    needed = [name.strip() for name, _, of in lines if marker in of.replace('"', "'")]
    # Double quotes: cmd.exe knows no others.
    return "pip install " + " ".join(f'"{name}"' for name in needed)
