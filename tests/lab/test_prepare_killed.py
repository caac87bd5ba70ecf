"""`quacklr prepare` killed by the system, at every moment that could matter, and what the same command makes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab_runs import heed_ctrl_c
from paused import MINUTES, wait_for
from quacklr.lab.data import SPLITS, open_corpus
from quacklr.lab.data.command import main
from quacklr.lab.errors import UserError

# Prepares in forked children, the first of which dies by SIGKILL at its n-th call of what hashes a document (in the
# middle of a shard), flushes, renames or removes a file (between shards, and around tokenizer, journal and manifest);
# what has a shard's name then must be a whole shard. Sometimes a second child dies too; the last goes through. Until n
# is beyond the last such call.
MORTAL = """
import hashlib, os, signal, sys, tokenizers
from pathlib import Path
from quacklr.lab.data.prepare import prepare
from quacklr.lab.data.request import Request
from quacklr.lab.data.sources import Local

def run(folder, death):
    child = os.fork()
    if child == 0:
        calls = 0
        def mortal(real):
            def call(*given, **named):
                nonlocal calls
                calls += 1
                if calls == death:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*given, **named)
            return call
        os.fsync = mortal(lambda handle: None)  # the system lives on, so what is written is there
        os.replace = mortal(os.replace)
        os.unlink = mortal(os.unlink)
        hashlib.blake2b = mortal(hashlib.blake2b)
        prepare(request, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

source, out = map(Path, sys.argv[1:])
request = Request(Local((source,)), {"val": 0.3, "probe": 0.2}, "train:270", None, 150)
assert run(out / "undisturbed", 0) == 0
moment = 1
while (ended := run(out / str(moment), moment)) == -signal.SIGKILL:
    for left in (out / str(moment)).glob("*.bin"):
        assert left.read_bytes() == (out / "undisturbed" / left.name).read_bytes(), (moment, left.name)
    if moment % 4 == 0:
        run(out / str(moment), moment // 2)
    assert run(out / str(moment), 0) == 0
    moment += 1
assert ended == 0
"""


# The command, which waits for a signal when it has given a file this name.
WAITING = """
import os, sys, time

def replace_and_wait(source, target, real=os.replace):
    real(source, target)
    if os.path.basename(target) == sys.argv[1]:
        time.sleep(float(sys.argv[2]))
        raise AssertionError("there was no signal")

os.replace = replace_and_wait
from quacklr.lab.data.command import main
sys.exit(main(sys.argv[3:]))
"""


def jsonl(path: Path, count: int, words: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"text {number} " * words}) + "\n" for number in range(count)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_at_any_moment_it_leaves_whole_shards_only_and_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", 16, 20)
    mortal = [sys.executable, "-c", MORTAL, str(source), str(tmp_path / "out")]
    done = subprocess.run(mortal, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = contents(tmp_path / "out" / "undisturbed")
    assert all(f"{split}-00001.bin" in expected for split in SPLITS)
    outs = list((tmp_path / "out").iterdir())
    assert len(outs) > 50
    for out in outs:
        assert contents(out) == expected, out.name


def stopped(arguments: list[str], moment: Path, by: signal.Signals) -> tuple[int, str]:
    """The exit code and the words of a command that gets a signal when it has written this file."""
    python = [sys.executable, "-c", WAITING, moment.name, str(60 * MINUTES), *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(python, **pipes, preexec_fn=heed_ctrl_c)
    wait_for(moment.exists, f"there is no {moment}", process.poll)
    process.send_signal(by)
    _, said = process.communicate()
    return process.returncode, said


def test_a_stopped_prepare_is_unfinished_until_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [str(jsonl(tmp_path / "a.jsonl", 1500, 40)), "--tokenizer", "train:300", "--shard-tokens", "4000", "--out"]
    code, said = stopped([*asked, str(out)], out / "train-00002.bin", signal.SIGINT)
    assert code == 130
    assert "documents are safe in whole shards, and the same command goes on after them" in said
    assert not list(out.glob(".*.part"))
    safe = {path: path.stat().st_mtime_ns for path in out.glob("train-0000[01].bin")}
    assert len(safe) == 2
    code, _ = stopped([*asked, str(out)], out / "train-00006.bin", signal.SIGKILL)
    assert code == -signal.SIGKILL
    with pytest.raises(UserError, match="is not finished"):
        open_corpus(str(out))
    assert main([*asked, str(out), "--val", "0.3"]) == 2
    tokenizer = (out / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(tokenizer + b" ")
    assert main([*asked, str(out)]) == 2  # or its shards would be of two tokenizers
    (out / "tokenizer.json").write_bytes(tokenizer)
    assert main([*asked, str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in safe} == safe
    assert main([*asked, str(tmp_path / "undisturbed")]) == 0
    assert contents(out) == contents(tmp_path / "undisturbed")
