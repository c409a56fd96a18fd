"""The store over Redis 7.0 / Valkey, without modules.

    {cluster}:workers       set of worker ids that ever held a lease (swept by readers)
    {cluster}:worker:ID     hash under a TTL: incarnation, start, role, state, address, record (JSON)
    {cluster}:start:ID      start number of the youngest incarnation that registered; outlives the lease
    {cluster}:kv:ID         stream of cache events, MAXLEN ~
    {cluster}:routers       set of router ids that ever had something pending (swept by readers)
    {cluster}:pending:ID    hash under a TTL: worker id -> "tokens requests" that the router placed there
    {cluster}:adapters      hash: name of an adapter -> its entry (JSON); :revision -> one more with every change; :gone ->
                            last numbers of unloaded names (JSON). In one key, so that a loss of entries loses the revision, too

Incarnations are ordered by a start number that Redis draws at the first registration: its own clock in microseconds, or
one more than the last, whichever is larger, so that the order survives a FLUSHALL. A key of a wrong type is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MaxConnectionsError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from diptych.common.errors import ConfigError
from diptych.common.lookup import NameLookup, is_name
from diptych.common.store.adapters import MAX_ADAPTERS, RESTORED_STEP, AdapterEntry, AdapterTable
from diptych.common.store.codec import (
    BadRowError,
    check_id,
    decode_adapter,
    decode_event,
    decode_gone,
    decode_pending,
    decode_record,
    encode_adapter,
    encode_event,
    encode_gone,
    encode_pending,
    encode_record,
)
from diptych.common.store.interface import KvEvent, Pending, StoreError
from diptych.common.store.redis_url import Connected, connect
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import TIER_NAMES
from diptych.common.tls import NO_FILES, RedisTls

T = TypeVar("T")

MAX_WORKERS = 1024
MAX_ROUTERS = 64
_START_TTL_S = 7 * 24 * 3600
_READ_COUNT = 256
_UNSUITABLE_SERVER = (ReadOnlyError, ClusterDownError, AskError, TryAgainError)
"""Errors that mean that the address now leads to an unsuitable server, such as a replica. (redis-py treats LOADING and
a wrong password as connection errors; MASTERDOWN and MOVED are subclasses.)"""
_UNSUITABLE_SERVER_CODES = (
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "MISCONF",
    "BUSY",
    "UNKILLABLE",
)
"""The same, by code, where redis-py has no class."""

# KEYS: row, start, workers. ARGV: id, incarnation, start (0: draw one), ttl_ms, start ttl_s, role, state, address,
# record. Returns the start number as text, or "" when a younger incarnation holds the name.
_PUT = """
local function ensure(key, kind)
  local is = redis.call('TYPE', key).ok
  if is ~= kind and is ~= 'none' then redis.call('DEL', key) end
end
ensure(KEYS[1], 'hash'); ensure(KEYS[2], 'string'); ensure(KEYS[3], 'set')
local youngest = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
local row_start = tonumber(redis.call('HGET', KEYS[1], 'start') or '0') or 0
local mine = tonumber(ARGV[3])
if mine == 0 and redis.call('HGET', KEYS[1], 'incarnation') == ARGV[2] then mine = row_start end
if row_start > youngest then youngest = row_start end
-- Redis refuses a script that is short of memory at its first write, if that one asks for memory: this one does not, so that
-- a lease that stands is renewed all the same.
if redis.call('HGET', KEYS[1], 'incarnation') == ARGV[2] and not (mine ~= 0 and mine < youngest) then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
if mine == 0 then
  local t = redis.call('TIME')
  mine = math.max(youngest + 1, tonumber(t[1]) * 1000000 + tonumber(t[2]))
elseif mine < youngest then
  return ''
end
local text = string.format('%.0f', mine)
redis.call('SET', KEYS[2], text, 'EX', ARGV[5])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'start', text, 'role', ARGV[6], 'state', ARGV[7],
  'address', ARGV[8], 'record', ARGV[9])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
return text
"""

# KEYS: row, workers. ARGV: id, incarnation.
_REMOVE = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return 0 end
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
"""

# KEYS: stream. ARGV: maxlen, number of fields of one event (names and values), then the events' fields in a row.
_APPEND = """
local is = redis.call('TYPE', KEYS[1]).ok
if is ~= 'stream' and is ~= 'none' then redis.call('DEL', KEYS[1]) end
local width = tonumber(ARGV[2])
for i = 3, #ARGV, width do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, i, i + width - 1))
end
redis.call('EXPIRE', KEYS[1], 86400)
return 1
"""


# KEYS: row, routers. ARGV: id, ttl_ms, then worker ids and their sums.
_PUT_PENDING = """
local is = redis.call('TYPE', KEYS[2]).ok
if is ~= 'set' and is ~= 'none' then redis.call('DEL', KEYS[2]) end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if #ARGV > 2 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('SADD', KEYS[2], ARGV[1])
else
  redis.call('SREM', KEYS[2], ARGV[1])
end
return 1
"""

# KEYS: bucket. ARGV: tokens a minute, requested tokens. Returns (granted, level) as text: Redis truncates numbers to
# integers.
_LEASE = """
local is = redis.call('TYPE', KEYS[1]).ok
if is ~= 'hash' and is ~= 'none' then redis.call('DEL', KEYS[1]) end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local full, want = tonumber(ARGV[1]), tonumber(ARGV[2])
local level = tonumber(redis.call('HGET', KEYS[1], 'level') or '') or full
local at = tonumber(redis.call('HGET', KEYS[1], 'at') or '') or now
level = math.min(full, level + math.max(0, now - at) * full / 60)
local granted = math.max(0, math.min(want, level))
if want < 0 then granted = math.max(want, -full) end
level = math.min(full, level - granted)
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], 120000)
return {string.format('%.6f', granted), string.format('%.6f', level)}
"""


_REVISION, _GONE = ":revision", ":gone"
"""Fields of the hash that can be no adapter's name."""

_REVISION_OF_ADAPTERS = """
local function revision_of(key)
  if redis.call('TYPE', key).ok ~= 'hash' then return '0' end
  return redis.call('HGET', key, ':revision') or '0'
end
"""

# KEYS: adapters. ARGV: the known revision. Returns nil where it is that one, else the revision and the hash.
_READ_ADAPTERS = (
    _REVISION_OF_ADAPTERS
    + """
local revision = revision_of(KEYS[1])
if revision == ARGV[1] then return nil end
if revision == '0' then return {revision, {}} end
return {revision, redis.call('HGETALL', KEYS[1])}
"""
)

# KEYS: adapters. ARGV: the expected revision, what is gone, name, entry ("": remove it). Returns the new revision, or "".
_WRITE_ADAPTER = (
    _REVISION_OF_ADAPTERS
    + """
local revision = revision_of(KEYS[1])
if revision ~= ARGV[1] then return '' end
if revision == '0' then redis.call('DEL', KEYS[1]) end
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], ARGV[3]) else redis.call('HSET', KEYS[1], ARGV[3], ARGV[4]) end
local text = string.format('%.0f', tonumber(revision) + 1)
redis.call('HSET', KEYS[1], ':revision', text, ':gone', ARGV[2])
return text
"""
)

# KEYS: adapters. ARGV: the expected revision, fields and values of the hash. Returns whether it was that one.
_RESTORE_ADAPTERS = (
    _REVISION_OF_ADAPTERS
    + """
if revision_of(KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""
)


class RedisStore:
    """See Store.

    Args:
        url: see redis_url.py; one server, or Sentinels that name the primary.
        cluster: name that keeps several clusters apart on one server.
        timeout_s: bound of every call (a blocking read: this plus its block_s).
        tls: files for rediss://.
    Raises: ConfigError on a URL or cluster name that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str = "diptych",
        timeout_s: float = 1.0,
        max_events: int = 10_000,
        tls: RedisTls = NO_FILES,
    ) -> None:
        try:
            check_id(cluster, "cluster")
        except BadRowError as err:
            raise ConfigError("cluster", cluster, str(err)) from None
        self._prefix = "{" + cluster + "}"
        self._timeout_s = timeout_s
        self._max_events = max_events
        self._starts: dict[tuple[str, str], str] = {}
        self.bad_rows = 0
        """Rows and events that were read and are not what they should be: they are skipped."""
        self.unknown_tiers = 0
        """Tiers in leases that this version does not know."""
        self._url = url
        self._tls = tls
        self._connected = connect(url, timeout_s=timeout_s, tls=tls)
        self._calls: dict[Connected, int] = {}
        """Number of calls running on each client; a replaced client is closed after its last call."""
        self._closing: set[asyncio.Task[None]] = set()
        host, port = self._connected.first
        self._lookup = NameLookup(host, port) if is_name(host) else None
        self._failed = False

    def _key(self, kind: str, name: str = "") -> str:
        return f"{self._prefix}:{kind}:{name}" if name else f"{self._prefix}:{kind}"

    async def _call(self, work: Awaitable[T], extra_s: float = 0.0) -> T:
        if self._failed and self._lookup is not None and (why := await self._lookup.failure(self._timeout_s)):
            # Each attempt to connect would leave a lookup behind; they would accumulate while the resolver does not
            # answer.
            if asyncio.iscoroutine(work):
                work.close()
            raise StoreError(why)
        used = self._connected
        self._calls[used] = self._calls.get(used, 0) + 1
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                answer = await work
            self._failed = False
            return answer
        except TimeoutError:
            self._failed = True
            raise StoreError(f"redis did not answer in {self._timeout_s + extra_s:g} s") from None
        except (RedisError, OSError) as err:
            self._failed = self._leave(used, err)
            raise StoreError(f"redis: {type(err).__name__}: {err}") from err
        finally:
            self._calls[used] -= 1
            self._close_replaced()

    async def _rows(self, pipe: Any) -> list[Any]:
        """The results of a pipeline; an error of a single row is returned as an exception. Raises: StoreError for other
        errors."""
        used = self._connected
        rows: list[Any] = await self._call(pipe.execute(raise_on_error=False))
        for row in rows:
            if isinstance(row, RedisError) and _is_connection_error(row):
                self._failed = self._leave(used, row)
                self._close_replaced()
                raise StoreError(f"redis: {type(row).__name__}: {row}") from row
        return rows

    @property
    def _redis(self) -> Any:
        return self._connected.client

    def _leave(self, used: Connected, error: Exception) -> bool:
        """After a connection error, or an answer of an unsuitable server, the next call connects anew, through the
        address or the Sentinels. All connections are dropped, since they lead to the same server. Returns: whether it
        was such an error."""
        if not _is_connection_error(error):
            return False
        if used is self._connected:
            self._connected = connect(self._url, timeout_s=self._timeout_s, tls=self._tls)
        return True

    def _close_replaced(self) -> None:
        for client in [one for one, calls in self._calls.items() if not calls and one is not self._connected]:
            del self._calls[client]
            task = asyncio.get_running_loop().create_task(_close(client))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _eval(self, script: str, keys: list[str], args: list[Any]) -> Any:
        return await self._call(self._redis.eval(script, len(keys), *keys, *args))

    async def ping(self) -> None:
        """Raises: StoreError when Redis does not answer."""
        await self._call(self._redis.execute_command("PING"))

    async def put_worker(self, record: WorkerRecord, *, ttl_s: float) -> bool:
        name = check_id(record.worker_id)
        key = (name, record.incarnation)
        answer = await self._eval(
            _PUT,
            [self._key("worker", name), self._key("start", name), self._key("workers")],
            [
                name,
                record.incarnation,
                self._starts.get(key, "0"),
                max(1, int(ttl_s * 1000)),
                _START_TTL_S,
                record.role,
                record.state,
                record.address,
                encode_record(record),
            ],
        )
        if not answer:
            return False
        self._starts[key] = answer.decode() if isinstance(answer, bytes) else str(answer)
        return True

    async def remove_worker(self, worker_id: str, incarnation: str) -> None:
        name = check_id(worker_id)
        await self._eval(_REMOVE, [self._key("worker", name), self._key("workers")], [name, incarnation])

    async def _names(self, kind: str) -> list[str]:
        """The ids in a set of ids, sorted. Raises: StoreError also when the server accepts reads but no writes (a
        replica, or a full disk): its data would become stale while leases expire."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.execute_command("SMEMBERS", self._key(kind))
        pipe.execute_command("SREM", self._key(kind), "")  # changes nothing, but is rejected like every write
        members, written = await self._rows(pipe)
        if isinstance(members, ResponseError):  # a key of a wrong type; the next writer replaces it
            self.bad_rows += 1
            return []
        if isinstance(written, RedisError):
            raise StoreError(f"redis takes no writes: {type(written).__name__}: {written}") from written
        names = []
        for raw in members:
            try:
                names.append(check_id(raw.decode()))
            except (BadRowError, UnicodeDecodeError):
                self.bad_rows += 1
        return sorted(names)

    async def list_workers(self) -> list[WorkerRecord]:
        names = (await self._names("workers"))[:MAX_WORKERS]
        if not names:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hget(self._key("worker", name), "record")
        rows = await self._rows(pipe)
        records, gone = [], []
        for name, raw in zip(names, rows, strict=True):
            if raw is None:
                gone.append(name)
                continue
            try:
                if not isinstance(raw, bytes):
                    raise BadRowError("record: not a row")
                record = decode_record(raw)
                if record.worker_id != name:
                    raise BadRowError("record: names another worker")
            except BadRowError:
                self.bad_rows += 1
                continue
            self.unknown_tiers += sum(tier.name not in TIER_NAMES for tier in record.tiers)
            records.append(record)
        if len(gone) > MAX_WORKERS // 4:
            # A worker that returns adds itself again with its next heartbeat.
            await self._call(self._redis.execute_command("SREM", self._key("workers"), *gone))
        return records

    async def append_events(self, worker_id: str, events: Sequence[KvEvent]) -> None:
        if not events:
            return
        rows = [encode_event(event) for event in events]
        args: list[Any] = [self._max_events, 2 * len(rows[0])]
        for row in rows:
            for field, value in row.items():
                args += [field, value]
        await self._eval(_APPEND, [self._key("kv", check_id(worker_id))], args)

    async def read_events(
        self, cursors: Mapping[str, str], *, block_s: float
    ) -> dict[str, list[tuple[str, KvEvent | None]]]:
        if not cursors:
            return {}
        try:
            return await self._read(cursors, block_s)
        except StoreError as err:
            if not isinstance(err.__cause__, ResponseError) or len(cursors) == 1:
                raise
        # One key of a wrong type fails the whole command: read the others one by one.
        found = {}
        for name, cursor in cursors.items():
            try:
                found.update(await self._read({name: cursor}, 0.0))
            except StoreError as err:
                if not isinstance(err.__cause__, ResponseError):
                    raise
                self.bad_rows += 1
        return found

    async def _read(self, cursors: Mapping[str, str], block_s: float) -> dict[str, list[tuple[str, KvEvent | None]]]:
        names = {self._key("kv", check_id(name)).encode(): name for name in cursors}
        command: list[Any] = ["XREAD", "COUNT", _READ_COUNT]
        if block_s > 0:
            command += ["BLOCK", max(1, int(block_s * 1000))]
        command += ["STREAMS", *names, *cursors.values()]
        answer = await self._call(self._redis.execute_command(*command), block_s)
        found: dict[str, list[tuple[str, KvEvent | None]]] = {}
        for key, entries in answer.items() if isinstance(answer, dict) else answer or ():
            events = found.setdefault(names[key], [])
            for entry_id, fields in entries:
                event = None
                try:
                    event = decode_event(fields)
                except BadRowError:
                    # The gap in the sequence makes the reader fetch a snapshot. Of a tier that is unknown here it misses nothing.
                    self.bad_rows += 1
                events.append((entry_id.decode(), event))
        return found

    async def put_pending(self, router_id: str, pending: Pending, *, ttl_s: float) -> None:
        name = check_id(router_id, "router_id")
        args: list[Any] = [name, max(1, int(ttl_s * 1000))]
        for worker_id, value in encode_pending(pending).items():
            args += [worker_id, value]
        await self._eval(_PUT_PENDING, [self._key("pending", name), self._key("routers")], args)

    async def list_pending(self) -> dict[str, Pending]:
        names = (await self._names("routers"))[:MAX_ROUTERS]
        if not names:
            return {}
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self._key("pending", name))
        rows = await self._rows(pipe)
        found: dict[str, Pending] = {}
        gone = [name for name, row in zip(names, rows, strict=True) if not row]
        for name, row in zip(names, rows, strict=True):
            try:
                if not isinstance(row, dict):
                    raise BadRowError("pending: not a row")
                if row:
                    found[name] = decode_pending(row)
            except BadRowError:
                self.bad_rows += 1
        if gone:  # a router that returns adds itself again
            await self._call(self._redis.execute_command("SREM", self._key("routers"), *gone))
        return found

    async def lease_tokens(self, name: str, *, per_minute: int, want: float) -> tuple[float, float]:
        key = self._key("budget", check_id(name, "budget"))
        granted, level = await self._eval(_LEASE, [key], [per_minute, f"{want:.6f}"])
        return float(granted), float(level)

    @property
    def _adapter_keys(self) -> list[str]:
        return [self._key("adapters")]

    async def read_adapters(self, known: int) -> AdapterTable | None:
        answer = await self._eval(_READ_ADAPTERS, self._adapter_keys, [str(known)])
        if answer is None:
            return None
        revision, flat = answer
        if not revision.isdigit() or len(revision) > 16:
            raise StoreError("redis: the revision of the adapters is not a number")
        rows = dict(zip(flat[::2], flat[1::2], strict=True))
        entries: dict[str, AdapterEntry] = {}
        gone: dict[str, int] = {}
        rows.pop(_REVISION.encode(), None)
        if (raw_gone := rows.pop(_GONE.encode(), None)) is not None:
            try:
                gone = decode_gone(raw_gone)
            except BadRowError:
                self.bad_rows += 1
        for raw_name, raw in rows.items():
            try:
                name = raw_name.decode()
                entries[name] = decode_adapter(name, raw)
            except (BadRowError, UnicodeDecodeError):
                self.bad_rows += 1
        return AdapterTable(int(revision), dict(sorted(entries.items())[:MAX_ADAPTERS]), gone)

    async def write_adapter(
        self, name: str, entry: AdapterEntry | None, *, revision: int, gone: Mapping[str, int]
    ) -> int | None:
        row = b"" if entry is None else encode_adapter(entry)
        args = [str(revision), encode_gone(gone), name, row]
        answer = await self._eval(_WRITE_ADAPTER, self._adapter_keys, args)
        return int(answer) if answer else None

    async def restore_adapters(self, table: AdapterTable, *, over: int = 0) -> bool:
        args: list[Any] = [str(over), _REVISION, str(table.revision + RESTORED_STEP), _GONE, encode_gone(table.gone)]
        for name, entry in table.entries.items():
            args += [name, encode_adapter(entry)]
        return bool(await self._eval(_RESTORE_ADAPTERS, self._adapter_keys, args))

    async def close(self) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)
        for client in {*self._calls, self._connected}:
            await client.close()


def _is_connection_error(error: Exception) -> bool:
    if not isinstance(error, ResponseError):
        return not isinstance(error, MaxConnectionsError)
    words = str(error).split()
    # Servers before 7.0 wrap a script's error: "ERR Error running script ...: -READONLY You can't ...".
    codes = [*words[:1], *(word[1:] for word in words if word.startswith("-"))]
    return isinstance(error, _UNSUITABLE_SERVER) or any(code in _UNSUITABLE_SERVER_CODES for code in codes)


async def _close(client: Connected) -> None:
    with contextlib.suppress(RedisError, OSError):
        await client.close()
