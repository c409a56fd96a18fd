"""A grammar compiled before an attempt comes with it."""

import asyncio
from typing import Any, cast

from diptych.common.errors import OverloadedError
from diptych.decode.attempt_manager import AttemptManager
from diptych.rpc.v1 import decode_pb2, types_pb2


def command(source):
    grammar = types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_REGEX, source=source)
    return decode_pb2.Command(prepare=decode_pb2.Prepare(grammar=grammar))


async def test_it_is_compiled_and_what_goes_wrong_ends_nothing():
    compiled, done = [], asyncio.Event()

    async def compile_grammar(grammar):
        compiled.append(grammar.source)
        if grammar.source == "b":
            done.set()
        raise OverloadedError("busy")

    none = cast(Any, None)
    manager = AttemptManager(none, none, none, path="", max_attempts=1, compile_grammar=compile_grammar)
    session = manager.open_session()
    for source in ("a", "", "b"):
        session.on_command(command(source))
    await done.wait()
    assert compiled == ["a", "b"], "an empty one is refused"
    assert manager.num_attempts == 0
    manager.fail_all()


async def test_a_worker_that_shuts_down_gives_it_up():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def compile_grammar(grammar):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    none = cast(Any, None)
    manager = AttemptManager(none, none, none, path="", max_attempts=1, compile_grammar=compile_grammar)
    manager.open_session().on_command(command("a"))
    await begun.wait()
    manager.fail_all()
    await ended.wait()
