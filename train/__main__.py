"""`accelerate launch -m train CONFIG [overrides]`: the launched form of `draftsmith train`."""

import sys

from draftsmith.cli.main import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="draftsmith")
