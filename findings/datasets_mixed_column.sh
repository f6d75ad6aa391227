#!/usr/bin/env bash
# Versions: datasets 5.2.0
# Behaviour: a column of a JSON-lines file that holds strings and something else is read as type Json.
#   Its strings are then read as JSON once more where they can be: "007" becomes 7, "null" becomes
#   None, "[1]" becomes a list. Strings that are not JSON stay as they are. No message says so.
# Guess: a string in the file is a string in the data set, as it is in a column of strings only.
# Seen:
#   all strings: ['007', 'null', '[1]', 'four']
#   and one number: [7, None, [1], 'four', 4]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import json
import sys
import tempfile

import datasets

datasets.disable_progress_bars()


def read(values: list) -> list:
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/rows.jsonl", "w") as file:
            file.writelines(json.dumps({"answer": value}) + "\n" for value in values)
        rows = datasets.load_dataset(
            "json", data_files=file.name, split="train", cache_dir=f"{folder}/cache"
        )
        return [row["answer"] for row in rows]


strings = ["007", "null", "[1]", "four"]
found = [read(strings), read([*strings, 4])]
print("all strings:", found[0])
print("and one number:", found[1])
sys.exit(0 if found == [strings, [7, None, [1], "four", 4]] else 1)
END
