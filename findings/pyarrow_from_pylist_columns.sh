#!/usr/bin/env bash
# Versions: pyarrow 26.0.1
# Behaviour: `pa.Table.from_pylist` takes the names of its columns from the first row. What later rows have beside
#   them is left out, without an error or a warning.
# Guess: the columns are those of all rows, with null where a row has none, as `from_pylist` does for a key that a
#   later row lacks, and as `pa.array` of the same rows does.
# Seen:
#   first row with prompt only: columns ['prompt'], pa.array's fields ['prompt', 'tools']
#   first row with both: columns ['prompt', 'tools'], pa.array's fields ['prompt', 'tools']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import pyarrow as pa

rows = [{"prompt": "hello"}, {"prompt": "weather?", "tools": "[]"}]
seen = []
for name, some in (("prompt only", rows), ("both", rows[::-1])):
    columns = pa.Table.from_pylist(some).column_names
    fields = [field.name for field in pa.array(some).type]
    print(f"first row with {name}: columns {columns}, pa.array's fields {fields}")
    seen.append((columns, sorted(fields)))
both = ["prompt", "tools"]
sys.exit(0 if seen[0] == (["prompt"], both) and sorted(seen[1][0]) == both else 1)
END
