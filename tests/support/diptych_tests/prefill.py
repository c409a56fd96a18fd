"""A prefill worker in a child process (prefill_process.py)."""

from __future__ import annotations

from diptych.worker.refs import WorkerRef
from diptych_tests import pd
from diptych_tests.line_process import LineProcess


class Prefill(LineProcess):
    """Duck-typed as the WorkerRuntime for submit_message."""

    worker_id: str
    ref: WorkerRef

    @classmethod
    async def start(cls, worker_id: str, *, inside: tuple[str, ...] = (), **options: object) -> Prefill:
        """`inside`: as in LineProcess.spawn."""
        settings = {"worker_id": worker_id, "transport": "ucx", "leg_silence_s": pd.NEVER_S, **options}
        child = await cls.spawn("prefill_process", settings, inside=inside, quiet=True)
        child.worker_id = worker_id
        child.ref = WorkerRef(worker_id, child.hello["incarnation"], child.hello["address"])
        return child

    async def hold(self, after: int) -> None:
        await self.ask(f"hold {after}")

    async def held(self) -> None:
        assert (await self.answer())["held"]
