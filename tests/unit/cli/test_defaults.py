"""A setting that several processes or layers have means the same in each: its default is written once."""

from __future__ import annotations

import dataclasses

import pytest

from diptych.cli.serve.config import ServeConfig
from diptych.cli.up.config import UpConfig
from diptych.engine.config import EngineConfig
from diptych.worker.config import WorkerConfig
from diptych.worker.defaults import DeviceFacts, settled

OF_THE_PLACE = {"host", "drain_s", "role", "model", "transport"}
"""Fields of these names mean another thing: an interface, a whole process, or what `up` decides."""
WORKER_DECIDES = {"max_num_seqs", "max_num_batched_tokens"}


def defaults(config: type) -> dict[str, object]:
    return {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}


@pytest.mark.parametrize("config", [EngineConfig, ServeConfig, UpConfig])
def test_shared_settings_have_the_workers_defaults(config: type) -> None:
    worker, other = defaults(WorkerConfig), defaults(config)
    if config is EngineConfig:  # what a worker leaves open is settled by its device
        worker = dataclasses.asdict(settled(WorkerConfig(), DeviceFacts(), None)[0])
    shared = (worker.keys() & other.keys()) - OF_THE_PLACE
    assert shared >= {"block_size"}
    for name in sorted(shared):
        if config is UpConfig and name in WORKER_DECIDES:
            assert other[name] == 0, "0: the worker's own"
        else:
            assert (other[name] or None) == (worker[name] or None), name
