"""The constraint checker over a scripted compiler process: time, death, memory of verdicts, close.

The script stands for the native compiler: its "text" says what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference_svc.adapters.vllm_engine import constraint_checker
from inference_svc.adapters.vllm_engine.constraint_checker import WAITING_MAX, ConstraintChecker
from sluice.errors import Code, SluiceError

SCRIPT = """
import json, os, sys, time
with open(__file__ + ".log", "a") as log:
    log.write("started\\n")
    log.flush()
    tokenizer = json.loads(sys.stdin.readline())["tokenizer"]
    print("ready" if tokenizer == "a tokenizer" else "what?", flush=True)
    for line in sys.stdin:
        text = json.loads(line)["text"]
        log.write(text + "\\n")
        log.flush()
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os._exit(139)
        time.sleep(float(text) if text.replace(".", "").isdigit() else 0)
        print("refused" if text == "bad" else "ok", flush=True)
"""


class Compiler:
    """The script on disk, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "compiler.py"
        self.path.write_text(SCRIPT)

    def asked(self) -> list[str]:
        log = Path(f"{self.path}.log")
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The script in the place of the real program."""
    made = Compiler(tmp_path)
    monkeypatch.setattr(constraint_checker, "PROGRAM", made.path)
    return made


@pytest.fixture
async def checker(compiler: Compiler) -> AsyncIterator[ConstraintChecker]:
    """A checker that is started."""
    made = ConstraintChecker("a tokenizer", seconds_max=0.5, memory_bytes=1 << 30)
    await made.start()
    yield made
    await made.close()


async def test_a_verdict_comes_from_the_compiler_once(
    checker: ConstraintChecker, compiler: Compiler
) -> None:
    for _ in range(2):
        assert await checker.compiles("regex", "good")
        assert not await checker.compiles("regex", "bad")
    assert compiler.asked() == ["started", "good", "bad"]


async def test_the_same_text_of_another_kind_is_another_constraint(
    checker: ConstraintChecker, compiler: Compiler
) -> None:
    await checker.compiles("regex", "good")
    await checker.compiles("ebnf", "good")
    assert compiler.asked() == ["started", "good", "good"]


@pytest.mark.parametrize("text", ["hang", "die"])
async def test_what_goes_beyond_the_limits_is_refused_and_remembered(
    checker: ConstraintChecker, compiler: Compiler, text: str
) -> None:
    """Goal: no constraint can occupy the service. Method: a compiler that hangs, or dies, on one
    text. Oracle: refused within the limit; refused again without asking; the next one compiles in
    a new process. Seed: none. Seen to fail with the kill after the time limit removed."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert not await checker.compiles("regex", text)
    assert loop.time() - began_s < 5
    assert not await checker.compiles("regex", text)
    assert await checker.compiles("regex", "good")
    assert compiler.asked() == ["started", text, "started", "good"]


async def test_a_cancelled_check_keeps_question_and_answer_in_step(
    checker: ConstraintChecker,
) -> None:
    loop = asyncio.get_running_loop()
    gone = loop.create_task(checker.compiles("regex", "0.2"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert not await checker.compiles("regex", "bad")
    assert await checker.compiles("regex", "good")


async def test_checks_beyond_the_queue_are_shed(checker: ConstraintChecker) -> None:
    loop = asyncio.get_running_loop()
    waiting = [
        loop.create_task(checker.compiles("regex", f"good {number}"))
        for number in range(WAITING_MAX)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SluiceError) as caught:
        await checker.compiles("regex", "one too many")
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert all(await asyncio.gather(*waiting))


async def test_a_compiler_that_does_not_start_is_unavailable(compiler: Compiler) -> None:
    checker = ConstraintChecker("another tokenizer", seconds_max=0.5, memory_bytes=1 << 30)
    with pytest.raises(SluiceError) as caught:
        await checker.start()
    assert caught.value.code is Code.UNAVAILABLE
    await checker.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_close_ends_the_process_and_is_final(checker: ConstraintChecker, busy: bool) -> None:
    loop = asyncio.get_running_loop()
    running = loop.create_task(checker.compiles("regex", "hang" if busy else "good"))
    await asyncio.sleep(0.05)
    process = checker._process
    assert process is not None
    await checker.close()
    await checker.close()
    await asyncio.gather(running, return_exceptions=True)
    assert process.returncode is not None
    with pytest.raises(SluiceError) as caught:
        await checker.compiles("regex", "another")
    assert caught.value.code is Code.UNAVAILABLE
