#!/usr/bin/env bash
# Versions: datasets 5.2.0
# Behaviour: a streamed data set that is made anew passes over a state that was taken in the second epoch (`set_epoch(1)`):
#   it begins with its first row, without a message. The state has the number of the epoch, and `load_state_dict` does not
#   set it. With `set_epoch(1)` called first, it goes on.
# Guess: it goes on where the state was taken, or says that it cannot.
# Seen:
#   state of epoch 0 after 15 of 20 rows: goes on with row 15, 5 rows
#   state of epoch 1 after 15 of 20 rows: goes on with row 0, 20 rows
#   state of epoch 1 after 15 of 20 rows, set_epoch before it: goes on with row 15, 5 rows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

from datasets import Dataset, IterableDataset

rows = Dataset.from_list([{"row": row} for row in range(20)])


def stream(epoch: int) -> IterableDataset:
    streamed = rows.to_iterable_dataset(num_shards=4)
    streamed.set_epoch(epoch)
    return streamed


def resumed(epoch: int, set_again: bool) -> list[int]:
    streamed = stream(epoch)
    for number, _ in enumerate(streamed, 1):
        if number == 15:
            break
    state = streamed.state_dict()
    again = stream(epoch if set_again else 0)
    again.load_state_dict(state)
    return [row["row"] for row in again]


seen = {}
for epoch, set_again in ((0, False), (1, False), (1, True)):
    seen[epoch, set_again] = resumed(epoch, set_again)
    print(
        f"state of epoch {epoch} after 15 of 20 rows{', set_epoch before it' * set_again}: "
        f"goes on with row {seen[epoch, set_again][0]}, {len(seen[epoch, set_again])} rows"
    )
sys.exit(0 if [len(rest) for rest in seen.values()] == [5, 20, 5] else 1)
END
