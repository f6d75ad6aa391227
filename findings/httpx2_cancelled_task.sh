#!/usr/bin/env bash
# Versions: httpx2 2.16.2, httpcore2 2.16.2, anyio 4.16.0
# Behaviour: an AsyncClient closes connections that the server has ended when the next request comes, inside anyio's shield.
#   task.cancel() of asyncio passes that shield: a request that is cancelled then leaves the others open, also
#   behind the end of the client. A cancelled scope of anyio does not.
# Guess: a cancelled request costs its own connection, and the end of the client closes all. So a proxy before an
#   engine may cancel the task of a client that hangs up.
# Seen:
#   task.cancel(): of 20 dead connections up to 16 stay open behind the client's end
#   scope.cancel(): of 20 dead connections up to 0 stay open behind the client's end
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet httpx2==2.16.2 httpcore2==2.16.2 anyio==4.16.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import asyncio
import gc
import sys
import warnings

import anyio
import httpx2


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One answer, a moment for the others, and the end of the connection."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    await asyncio.sleep(0.1)
    writer.close()


async def scenario(by: str, steps: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    async with httpx2.AsyncClient(trust_env=False) as client:
        await asyncio.gather(*(client.get(url) for _ in range(20)))
        await asyncio.sleep(0.2)  # the server has closed all 20
        scope = anyio.CancelScope()

        async def ask() -> None:
            with scope:
                await client.get(url)

        task = asyncio.create_task(ask())
        for _ in range(steps):
            await asyncio.sleep(0)
        (task if by == "task.cancel()" else scope).cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.close()


worst = {}
for by in ("task.cancel()", "scope.cancel()"):
    worst[by] = 0
    for steps in (4, 8, 12, 16):
        asyncio.run(scenario(by, steps))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gc.collect()
        worst[by] = max(worst[by], sum("unclosed transport" in str(x.message) for x in said))
    print(f"{by}: of 20 dead connections up to {worst[by]} stay open behind the client's end")
sys.exit(0 if worst["task.cancel()"] > 0 and worst["scope.cancel()"] == 0 else 1)
END
