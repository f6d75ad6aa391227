#!/usr/bin/env bash
# Versions: datasets 5.2.0
# Behaviour: if all strings of a JSON-lines column look like ISO dates, they are read as datetimes.
#   If an earlier file of the same data set made the column one of strings, they become strings
#   again, and those are other strings: a time of midnight is added.
# Guess: JSON has no dates, so a string stays the string that it is, whatever other rows hold.
# Seen:
#   in a file with other text: ['on time', '2024-01-02']
#   in a file of its own: [datetime.datetime(2024, 1, 2, 0, 0)]
#   in a second file: ['on time', '2024-01-02 00:00:00']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import datetime
import json
import sys
import tempfile

import datasets

datasets.disable_progress_bars()


def read(*files: list[str]) -> list:
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, values in enumerate(files):
            with open(f"{folder}/{number}.jsonl", "w") as file:
                file.writelines(json.dumps({"answer": value}) + "\n" for value in values)
            names.append(file.name)
        rows = datasets.load_dataset(
            "json", data_files=names, split="train", cache_dir=f"{folder}/cache"
        )
        return [row["answer"] for row in rows]


text, date = "on time", "2024-01-02"
found = [read([text, date]), read([date]), read([text], [date])]
print("in a file with other text:", found[0])
print("in a file of its own:", found[1])
print("in a second file:", found[2])
stated = [[text, date], [datetime.datetime(2024, 1, 2)], [text, f"{date} 00:00:00"]]
sys.exit(0 if found == stated else 1)
END
