"""The driver's context is begun on a thread, and what fails there is left to torch to report."""

from __future__ import annotations

import ctypes
import threading

import pytest

from diptych.worker import device_start


class Driver:
    """Counts calls. `failing`: the call that answers with an error."""

    def __init__(self, failing=""):
        self.calls, self._failing = [], failing

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            return 100 if name == self._failing else 0

        return call


def started(monkeypatch, driver, device="cuda"):
    monkeypatch.setattr(ctypes, "CDLL", driver if callable(driver) else lambda name: driver)
    before = set(threading.enumerate())
    device_start.begin_context(device)
    for thread in set(threading.enumerate()) - before:
        thread.join(300.0)
        assert not thread.is_alive()


ALL = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(("failing", "calls"), [("", ALL), ("cuInit", ALL[:1]), ("cuDeviceGet", ALL[:2])])
def test_18_the_context_is_made_as_far_as_the_driver_goes(monkeypatch, failing, calls):
    driver = Driver(failing)
    started(monkeypatch, driver)
    assert driver.calls == calls


def test_18_a_cpu_asks_no_driver(monkeypatch):
    driver = Driver()
    started(monkeypatch, driver, "cpu")
    assert driver.calls == []


def test_18_no_driver_is_no_error_here(monkeypatch):
    def missing(name):
        raise OSError(name)

    started(monkeypatch, missing)
