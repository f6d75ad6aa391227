"""`accelerate launch -m train CONFIG [overrides]`: the launched form of `draftsmith train`."""

import typer

from draftsmith.cli.train import train

if __name__ == "__main__":
    typer.run(train)
