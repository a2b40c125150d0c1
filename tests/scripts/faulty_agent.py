"""An agent's program. Its row names the mistake that it makes. `rewarded` is the expected answer of the endpoint.

The command of tests/scripts/agent_faults.py: it reads the row from its standard input. It needs no package.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PATIENCE = 1000  # seconds, as tests/helpers/tiny.py has it
ASKED = {"model": "m", "messages": [{"role": "user", "content": "so"}], "max_tokens": 3}


def ask(body: Any, key: str | None = None) -> int:
    """The status of the endpoint's answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            json.load(answer)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        json.load(error)["error"]["message"]
        return error.code


def rewarded(kind: str, folder: Path) -> float:
    """Do what is wrong; 1 for the statuses that it should be answered with."""
    if kind == "hangs":
        ask(ASKED)
        time.sleep(PATIENCE)
    elif kind == "dies":
        ask(ASKED)
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exits":
        raise SystemExit("it can't go on")
    elif kind == "floods":
        refused = ask({**ASKED, "n": 100})
        longer = ask({**ASKED, "messages": [{"role": "user", "content": "x" * 5000}]})
        with ThreadPoolExecutor(20) as threads:
            found = {*threads.map(ask, [{**ASKED, "max_tokens": 20}] * 60)}
        while (at_last := ask(ASKED)) == 200:  # until no request is left
            pass
        return float(refused == 429 and 200 in found <= {200, 403, 429} and longer == 400 and at_last == 403)
    elif kind == "rubbish":
        bodies = [b"\x00{rubbish", [], {**ASKED, "messages": 3}, {**ASKED, "messages": [{"role": []}]}, {}, b""]
        found = {*map(ask, bodies)}
        return float(found == {400} and ask({**ASKED, "unheard_of": {"a": 1}}) == 200 and ask(ASKED, "sk-not") == 401)
    elif kind == "late":
        return asks_late(folder)
    return float(ask(ASKED) == 200)


def asks_late(folder: Path) -> float:
    """One of the group's sessions ends and leaves a process behind that asks; the others wait for its answer."""
    told = folder / "late.txt"
    try:
        (folder / "late.claimed").touch(exist_ok=False)
    except FileExistsError:
        while not told.exists():
            time.sleep(0.02)
        return float(told.read_text() == "410")
    # In a session of its own: what is in the command's is killed when that ends.
    subprocess.Popen([sys.executable, __file__, "late", str(folder)], start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return 1.0


def main() -> None:
    if sys.argv[1] == "late":
        while (status := ask(ASKED)) in (200, 403):  # the endpoint does not know yet that the command has ended
            time.sleep(0.02)
        (written := Path(sys.argv[2], "late.part")).write_text(str(status))
        written.rename(written.with_name("late.txt"))
        return
    row = json.load(sys.stdin)
    print(json.dumps({"reward": rewarded(row["kind"], Path(sys.argv[1]))}))


if __name__ == "__main__":
    main()
