"""From an untrusted UncheckedRequest to a ValidatedRequest: everything is checked and filled in here, once.

model, label, policy, limits -> length -> tokens (off the event loop, see bounded_executor.py) -> context -> sampling, seed
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from diptych.common.clock import Clock
from diptych.common.errors import (
    DiptychError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestDeadlineError,
)
from diptych.common.ids import new_request_id
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams, with_seed
from diptych.common.sampling_table import MAX_BAD_WORDS
from diptych.common.secret import further_salt
from diptych.common.store.adapters import ChosenAdapter
from diptych.common.text.tokenizer import GenerationDefaults, TextLimit
from diptych.router.adapters.resolution import AdapterChoice
from diptych.router.api.packed_ids import PackedIds, Unpack, unpack
from diptych.router.preprocess.beam_options import beam_fields, sampling_of
from diptych.router.preprocess.bounded_executor import BoundedExecutor
from diptych.router.preprocess.checks import (
    check_ids,
    check_room,
    given,
    input_name,
    integer,
    label,
    salt_text,
    text_size,
    timeout,
)
from diptych.router.preprocess.retention import RetentionLimits, retention_of
from diptych.router.preprocess.text_bound import TextBound
from diptych.router.requests.messages import FAILURE_POLICIES, UncheckedRequest, ValidatedRequest
from diptych.router.requests.resume import Refs, ResumePoint, Seen, SeenChoice, digest_of
from diptych.router.tools.reasoning import CLOSE, OPEN

_MAX_KNOWN = 1024
_MAX_DETOKENIZED = 1_000_000
_MAX_BAD_WORD_CHARS = 256
_THINK_TAIL_TOKENS = 8
_LAST = 2**31 - 1
"""Priority of hints that name none."""
_BYTES_A_TOKEN = 4


class TextToIds(Protocol):
    """See common.text.tokenizer.ModelTokenizer."""

    vocab_size: int

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", limit: TextLimit | None = None
    ) -> list[int]: ...

    def encode_chat(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        *,
        tools: Any = None,
        extra: Any = None,
        continue_final_message: bool = False,
        limit: TextLimit | None = None,
    ) -> list[int]: ...

    def spans(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text. `offsets`: see ValidatedRequest."""

    text: str
    offsets: tuple[int, ...] = ()


def _echo_of(prompt: str, spans: list[tuple[int, int]], kept: int, *, from_left: bool) -> Echo:
    """The echo of the first or the last `kept` tokens."""
    if kept == len(spans):
        return Echo(prompt, tuple(begin for begin, _ in spans))
    spans = spans[:kept] if from_left else spans[-kept:]
    start = spans[0][0]
    return Echo(prompt[start : spans[-1][1]], tuple(begin - start for begin, _ in spans))


@dataclass(frozen=True, slots=True)
class PreprocessLimits:
    """Limits of one model.

    Args:
        model: the name clients use.
        max_model_len: called for every request: prompt plus answer, in tokens.
        text_bound: most bytes of text per token; None: unknown.
        pool_tokens: tokens of KV that the smallest decode pool holds, for each of so many beams; None: unknown.
    """

    model: str
    max_model_len: Callable[[], int]
    max_prompt_bytes: int
    local_prefill_max_tokens: int
    request_timeout_s: float
    text_bound: TextBound | None = None
    pool_tokens: Callable[[int], int | None] = lambda num_beams: None


class RequestPreprocessor:
    """Checks and tokenizes the requests of one model. `salt`: of a tenant's block identities. `unpack`: see
    router.packed_ids. `find`: the ref of an answer that a worker keeps, by Refs.key_of; "": there is none."""

    def __init__(
        self,
        tokenizer: TextToIds,
        limits: PreprocessLimits,
        *,
        defaults: GenerationDefaults,
        salt: Callable[[str], bytes],
        clock: Clock,
        rng: random.Random,
        unpack: Unpack = unpack,
        refs: Refs | None = None,
        find: Callable[[bytes], Awaitable[str]] | None = None,
        retention: RetentionLimits | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._refs = refs
        self._find = find
        self.retention = retention or RetentionLimits()
        self._wall = wall
        self._unpack = unpack
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = {name: value for name, value in asdict(defaults).items() if value is not None}
        self._salt = salt
        self._clock = clock
        self._rng = rng
        self._lanes = BoundedExecutor("prompts for the tokenizer", "tokenizer")
        self._known: dict[tuple[bytes, int], SamplingParams] = {}
        """Checked sampling values, except for a generated seed."""

    def close(self) -> None:
        self._lanes.close()

    async def prepare(self, spec: UncheckedRequest, adapter: AdapterChoice | None = None) -> ValidatedRequest:
        """`adapter`: that answers instead of the base model, which `spec.model` names. Raises: InvalidRequestError and
        PromptTooLongError naming the parameter, ModelNotFoundError, OverloadedError, RequestDeadlineError."""
        arrived = self._clock.now()
        limits = self._limits
        self._check_model(spec.model)
        own_label = label(spec.request_id, "request_id")
        key = label(spec.idempotency_key, "idempotency_key")
        policy = FAILURE_POLICIES.get(spec.failure_policy) if isinstance(spec.failure_policy, str) else None
        if policy is None:
            raise InvalidRequestError("failure_policy must be fail, recompute or retry", param="failure_policy")
        local = limits.local_prefill_max_tokens
        if spec.local_prefill_max_tokens is not None:
            local = integer(spec.local_prefill_max_tokens, "local_prefill_max_tokens", 0, 2**31 - 1)
        owner, salt = self._salt(spec.tenant), salt_text(spec.cache_salt)
        retention = retention_of(spec, owner, self.retention)
        if spec.prefetch:
            spec = _prompt_alone(spec)
        point = None if spec.resume_id is None else self._point(spec.resume_id, owner)  # before any work for it
        begun: ResumePoint | None = None
        if point is None and key and spec.resumable and spec.resume_after is None and not spec.prefetch:
            begun = await self._begun(key, owner)
        timeout_s = min(timeout(spec.timeout_s, limits.request_timeout_s), limits.request_timeout_s)
        param = input_name(spec)
        waits = param != "token_ids" or "bad_words" in spec.sampling
        try:
            async with asyncio.timeout(timeout_s) if waits else nullcontext():
                bad_words = await self._bad_words(spec.sampling.get("bad_words"))
                if param != "token_ids":
                    self._sampling(spec, limits.max_model_len(), bad_words)  # reject invalid numbers before tokenizing
                token_ids = await self._token_ids(spec, param)
        except TimeoutError:
            raise RequestDeadlineError("the deadline passed while the prompt was being tokenized") from None
        room = self._room(len(token_ids), param)
        sampling = self._sampling(spec, self._what_fits(spec, len(token_ids), room), bad_words)
        if begun is not None:
            point = replace(begun, seen=Seen((SeenChoice(),) * sampling.n))
        if point is not None:
            if "seed" in spec.sampling and sampling.seed % 2**64 != point.seed:
                raise _other_request(begun is not None)
            sampling = with_seed(sampling, point.seed)
            if "max_tokens" not in spec.sampling:  # the rest of the pools may be another one now
                sampling = replace(sampling, max_tokens=point.max_tokens)
        check_room(sampling.max_tokens, room)
        if spec.prefetch and local < len(token_ids):
            local = 0  # the next turn is computed on prefill, which is to have what only decode holds
        thinking = param == "messages" and self._ends_thinking(token_ids)
        # the grammar applies to the answer, not to the reasoning before it
        if thinking and sampling.grammar is not None:
            sampling = replace(sampling, grammar=replace(sampling.grammar, free_until=CLOSE))
        echo = await self._echo(spec, token_ids) if spec.echo else Echo("")
        prompt = Prompt(tuple(token_ids), further_salt(owner, salt) if salt else owner)
        request_id = new_request_id() if point is None else point.request_id
        chosen: ChosenAdapter | None = None
        if adapter is not None:
            chosen = adapter.of_request(request_id)
            prompt = msgspec.structs.replace(prompt, adapter=chosen.adapter_id)
        if point is not None:
            found = _of_point(point, prompt, sampling, adapter)
            if found is None:
                raise _other_request(begun is not None)
            chosen, prompt = found
        return ValidatedRequest(
            request_id=request_id,
            adapter=chosen,
            label=own_label,
            model=limits.model,
            prompt=prompt,
            sampling=sampling,
            owner=owner,
            explain=bool(spec.explain),
            local_prefill_max_tokens=local,
            failure_policy=policy,
            arrived=arrived,
            deadline=arrived + timeout_s,
            tenant=spec.tenant,
            priority=0 if spec.priority is None else integer(spec.priority, "priority", -(2**31), 2**31 - 1),
            thinking=thinking,
            echo=echo.text,
            echo_offsets=echo.offsets,
            idempotency_key=key,
            resume_after=self._resume_after(spec, sampling),
            resume=point,
            resumable=spec.resumable,
            found_by_key=begun is not None,
            created=int(self._wall()) if point is None else point.created,
            retention=retention,
            prefetch=bool(spec.prefetch),
        )

    def prepare_again(
        self,
        before: ValidatedRequest,
        prompt: PackedIds,
        timeout_s: float | None,
        *,
        draws_seed: bool,
        adapter: AdapterChoice | None = None,
    ) -> ValidatedRequest:
        """As `prepare`, for a request that differs from an earlier one only in its token ids. `draws_seed`: it has no
        seed. `adapter`: its version is chosen anew. Raises: as prepare."""
        arrived = self._clock.now()
        limits = self._limits
        within_s = min(timeout(timeout_s, limits.request_timeout_s), limits.request_timeout_s)
        room = self._room(prompt.count, "token_ids")
        if not prompt.count:
            raise InvalidRequestError("token_ids is empty", param="token_ids")
        token_ids, largest = self._unpack(prompt.packed, prompt.count)
        if largest >= self._tokenizer.vocab_size:
            check_ids(tuple(token_ids), self._tokenizer.vocab_size, limits.max_model_len())
        check_room(before.sampling.max_tokens, room)
        repeated = before.repeated or before.sampling
        request_id = new_request_id()
        chosen = None if adapter is None else adapter.of_request(request_id)
        return ValidatedRequest(  # twice as fast as `replace`
            request_id=request_id,
            adapter=chosen,
            label=before.label,
            model=before.model,
            prompt=Prompt(token_ids, before.prompt.cache_salt, "" if chosen is None else chosen.adapter_id),
            packed=prompt,
            sampling=with_seed(repeated, self._rng.getrandbits(63)) if draws_seed else repeated,
            owner=before.owner,
            explain=before.explain,
            local_prefill_max_tokens=before.local_prefill_max_tokens,
            failure_policy=before.failure_policy,
            arrived=arrived,
            deadline=arrived + within_s,
            tenant=before.tenant,
            priority=before.priority,
            repeated=repeated,
            retention=before.retention,
            prefetch=before.prefetch,
        )

    def _ends_thinking(self, token_ids: list[int]) -> bool:
        tail = self._tokenizer.decode(token_ids[-_THINK_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(OPEN)

    def _point(self, resume_id: object, owner: bytes) -> ResumePoint:
        """Raises: InvalidRequestError."""
        if self._refs is None:
            raise InvalidRequestError("resume_id: no answer goes on here", param="resume_id")
        return self._refs.read(resume_id, owner, "resume_id")

    async def _begun(self, key: str, owner: bytes) -> ResumePoint | None:
        """The answer that a worker keeps under the caller's idempotency key: its router may be gone."""
        if self._refs is None or self._find is None:
            return None
        ref = await self._find(self._refs.key_of(key, owner))
        return self._refs.begun(ref, owner, Seen(())) if ref else None

    def _resume_after(self, spec: UncheckedRequest, sampling: SamplingParams) -> tuple[int, ...]:
        """Raises: InvalidRequestError when the continuation could differ from the original answer."""
        if spec.resume_after is None:
            return ()
        ids = check_ids(spec.resume_after, self._tokenizer.vocab_size, sampling.max_tokens + 1, param="resume_after")
        if "seed" not in spec.sampling:
            raise InvalidRequestError("resume_after needs the seed of the interrupted answer", param="seed")
        if sampling.num_choices > 1 or sampling.beam_width or sampling.prompt_logprobs is not None:
            raise InvalidRequestError("resume_after requires one choice, without prompt_logprobs", param="resume_after")
        return tuple(ids)

    def _check_model(self, model: object) -> None:
        if not isinstance(model, str):
            raise InvalidRequestError("model must be text", param="model")
        if model not in ("", self._limits.model):
            name = model[:128].encode("ascii", "replace").decode()
            there = self._limits.model
            raise ModelNotFoundError(f"the model {name!r} does not exist; there is {there!r}", param="model")

    async def tokenize(self, spec: UncheckedRequest) -> list[int]:
        """Token ids of the spec's input. Raises: InvalidRequestError, ModelNotFoundError, OverloadedError."""
        self._check_model(spec.model)
        return await self._token_ids(spec, input_name(spec))

    async def detokenize(self, model: object, token_ids: object) -> str:
        """Text of `token_ids`, special tokens included. Raises: InvalidRequestError, ModelNotFoundError, OverloadedError."""
        self._check_model(model)
        ids = check_ids(token_ids, self._tokenizer.vocab_size, _MAX_DETOKENIZED, param="tokens")
        decode = partial(self._tokenizer.decode, ids, skip_special_tokens=False)
        return await self._lanes.run(decode, _BYTES_A_TOKEN * len(ids))

    async def _echo(self, spec: UncheckedRequest, token_ids: list[int]) -> Echo:
        size = _BYTES_A_TOKEN * len(token_ids)
        if not isinstance(spec.prompt, str):
            return Echo(await self._lanes.run(partial(self._tokenizer.decode, token_ids), size))
        if "logprobs" not in spec.sampling and spec.truncate_prompt_tokens is None:
            return Echo(spec.prompt)
        spans = await self._lanes.run(partial(self._tokenizer.spans, spec.prompt, spec.add_special_tokens), size)
        return _echo_of(spec.prompt, spans, len(token_ids), from_left=spec.truncation_side == "right")

    async def _bad_words(self, words: object) -> object:
        """Texts to token ids: each with and without a leading space, as inside and at the beginning of a text."""
        if words is None or not isinstance(words, (list, tuple)):
            return words
        if len(words) > MAX_BAD_WORDS // 2:
            raise InvalidRequestError(f"bad_words takes at most {MAX_BAD_WORDS // 2} words", param="bad_words")
        if not all(isinstance(word, str) and word.strip() and len(word) <= _MAX_BAD_WORD_CHARS for word in words):
            raise InvalidRequestError(
                f"bad_words must hold texts of 1 to {_MAX_BAD_WORD_CHARS} characters", param="bad_words"
            )
        return await self._lanes.run(partial(self._encode_words, list(words)))

    def _encode_words(self, words: list[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for word in words:
            bare = word.strip()
            for form in (bare, " " + bare):
                ids = self._tokenizer.encode(form, False, param="bad_words")
                if ids and ids not in found:
                    found.append(ids)
        return found

    async def _token_ids(self, spec: UncheckedRequest, param: str) -> list[int]:
        most = self._most_tokens(spec)
        bound = self._limits.text_bound if most is None else None
        more: dict[str, Any] = {} if bound is None else {"limit": bound.limit(self._limits.max_model_len())}
        if param == "token_ids":
            allowed = self._limits.max_model_len() if most is None else _MAX_DETOKENIZED
            ids = check_ids(spec.token_ids, self._tokenizer.vocab_size, allowed)
        elif param == "prompt":
            if not isinstance(spec.prompt, str):
                raise InvalidRequestError("prompt must be text", param="prompt")
            size = self._check_size(len(spec.prompt), param)
            encode = partial(self._tokenizer.encode, spec.prompt, spec.add_special_tokens, **more)
            ids = await self._lanes.run(encode, size)
        else:
            size = self._check_size(text_size(spec.messages) + spec.more_text, param)
            if spec.continue_final_message:
                more["continue_final_message"] = True
            encode = partial(
                self._tokenizer.encode_chat,
                spec.messages,
                spec.add_generation_prompt and not spec.continue_final_message,
                tools=spec.tools,
                extra=spec.chat_template_kwargs,
                **more,
            )
            ids = await self._lanes.run(encode, size)
        if not ids:
            raise InvalidRequestError(f"{param} is empty", param=param)
        if most is None or len(ids) <= most:
            return ids
        return ids[:most] if spec.truncation_side == "right" else ids[-most:]

    def _most_tokens(self, spec: UncheckedRequest) -> int | None:
        """Tokens to which the prompt is truncated; None: not at all. Raises: InvalidRequestError."""
        if spec.truncation_side not in (None, "left", "right"):
            raise InvalidRequestError("truncation_side must be left or right", param="truncation_side")
        if spec.truncate_prompt_tokens is None:
            return None
        context = self._limits.max_model_len()
        most = integer(spec.truncate_prompt_tokens, "truncate_prompt_tokens", -1, context - 1)
        if most == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens"
            )
        if most > 0:
            return most
        wanted = given(spec.sampling.get("max_tokens"), spec.default_max_tokens)
        answer = wanted if type(wanted) is int and wanted > 0 else 1
        pool = self._limits.pool_tokens(1)
        return max(1, (context if pool is None else min(context, pool + 1)) - answer)

    def _check_size(self, size: int, param: str) -> int:
        """`size`, in characters."""
        if size > self._limits.max_prompt_bytes:
            raise PromptTooLongError(
                f"{param} has more than {self._limits.max_prompt_bytes} characters of text", param=param
            )
        return size

    def _room(self, num_prompt_tokens: int, param: str) -> int:
        """Most tokens of the answer."""
        context = self._limits.max_model_len()
        if num_prompt_tokens >= context:
            raise PromptTooLongError(
                f"{param} has {num_prompt_tokens} tokens; the context of {context} needs room for one more",
                param=param,
            )
        return context - num_prompt_tokens

    def _what_fits(self, spec: UncheckedRequest, num_prompt_tokens: int, room: int) -> int:
        """Upper limit of a default max_tokens: the rest of the context, and the KV blocks of any decode worker. The KV
        of the last token is never computed."""
        if "max_tokens" in spec.sampling:
            return room
        width = beam_fields(spec).get("beam_width", spec.sampling.get("beam_width"))
        pool = self._limits.pool_tokens(width if type(width) is int and width > 0 else 1)
        return room if pool is None else max(1, min(room, pool + 1 - num_prompt_tokens))

    def _sampling(self, spec: UncheckedRequest, room: int, bad_words: object) -> SamplingParams:
        """`room`: upper limit of a default max_tokens."""
        unique = spec.grammar is not None or "bad_words" in spec.sampling or spec.use_beam_search is not None
        if unique or not spec.sampling_key:
            return self._check_sampling(spec, room, bad_words)
        key = (spec.sampling_key, 0 if "max_tokens" in spec.sampling else _default_max_tokens(spec, room))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._check_sampling(spec, room, bad_words)
        return known if "seed" in spec.sampling else with_seed(known, self._rng.getrandbits(63))

    def _check_sampling(self, spec: UncheckedRequest, room: int, bad_words: object) -> SamplingParams:
        return sampling_of(
            spec,
            vocab_size=self._tokenizer.vocab_size,
            seed=self._rng.getrandbits(63),
            max_tokens=_default_max_tokens(spec, room),
            defaults=self._defaults,
            bad_words=bad_words,
        )


def _prompt_alone(spec: UncheckedRequest) -> UncheckedRequest:
    """A hint's request: what concerns the answer alone has no effect, so that it may be the body of the request that follows.
    Raises: InvalidRequestError."""
    if spec.resume_id is not None or spec.resume_after is not None:
        raise InvalidRequestError("prefetch: an answer that goes on has its prompt cached", param="prefetch")
    return replace(
        spec,
        sampling={"max_tokens": 1},  # no worker has a step without a token
        sampling_key=b"",
        default_max_tokens=None,
        use_beam_search=None,
        grammar=None,
        echo=False,
        priority=_LAST if spec.priority is None else spec.priority,
    )


def _default_max_tokens(spec: UncheckedRequest, room: int) -> int:
    return room if spec.default_max_tokens is None else min(room, spec.default_max_tokens)


def _of_point(
    point: ResumePoint, prompt: Prompt, sampling: SamplingParams, adapter: AdapterChoice | None
) -> tuple[ChosenAdapter | None, Prompt] | None:
    """The version of the adapter with which the answer began, and the prompt with it: the registry may have changed since.
    None: this is not the request of the point."""
    for chosen in (None,) if adapter is None else adapter.likely(point.request_id):
        began = prompt if chosen is None else msgspec.structs.replace(prompt, adapter=chosen.adapter_id)
        if (point.digest, len(point.seen.choices)) == (digest_of(began, sampling), sampling.n):
            return chosen, began
    return None


def _other_request(by_key: bool) -> DiptychError:
    if by_key:
        return DuplicateRequestError("another request has this idempotency key", param="idempotency_key")
    return InvalidRequestError("resume_id: the request is not the one of this id", param="resume_id")
