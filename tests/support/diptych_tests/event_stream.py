"""Streams of server-sent events with ids, as a plain HTTP client reads them and goes on with them."""

from __future__ import annotations

import json


async def messages(response):
    """Each message of a stream, without its id, and its id."""
    assert response.status_code == 200, await response.aread()
    text = ""
    async for part in response.aiter_text():
        text += part
        *whole, text = text.split("\n\n")
        for message in whole:
            message = "\n".join(line for line in message.split("\n") if not line.startswith(":"))  # no pings
            first, _, rest = message.partition("\n")
            yield (rest, first.removeprefix("id: ")) if first.startswith("id: ") else (message, "")


def plain(seen):
    """The texts of a stream's messages, as a caller joins them: they may be cut in other places. Numbers must not have a gap."""
    text, rest, numbers = {}, [], []
    for message, _ in seen:
        data = message.split("data: ", 1)[1]
        if data == "[DONE]":
            rest.append(data)
            continue
        data = json.loads(data)
        numbers.append(data.get("sequence_number"))
        if data.get("delta") is not None and data["type"].endswith("delta"):
            text[data["item_id"]] = text.get(data["item_id"], "") + data["delta"]
            continue
        for choice in data.get("choices", ()):
            spoken = choice.get("text", choice.get("delta", {}).get("content"))
            facts = {name: choice.pop(name) for name in ("token_ids",) if choice.get(name) is not None}
            for name, values in facts.items():
                text.setdefault((choice["index"], name), []).extend(values)
            logprobs = choice.get("logprobs")
            for name, values in (logprobs or {}).items():
                if isinstance(values, list):
                    text.setdefault((choice["index"], name), []).extend(values)
            if spoken is not None and choice["finish_reason"] is None:
                text[choice["index"]] = text.get(choice["index"], "") + spoken
                rest.append(("text", data["id"], data["created"]))
            else:
                rest.append(data)
        if not data.get("choices"):
            data.pop("sequence_number", None)
            rest.append(data)
    if numbers and numbers[0] is not None:
        assert numbers == list(range(len(numbers)))
    ends = [one for one in rest if not (isinstance(one, tuple) and one[0] == "text")]
    return text, ends, {one[1:] for one in rest if isinstance(one, tuple)}


async def undisturbed(client, path, body):
    async with client.stream("POST", path, json=body) as response:
        return [pair async for pair in messages(response)]


def numbers_of(event_id):
    """(tokens of all choices, ...) of an id."""
    numbers = list(map(int, event_id.partition(".")[2].split("-")))
    return sum(numbers[3 : 3 + 5 * numbers[0] : 5]), numbers


async def undisturbed_after(client, path, body, event_id):
    async with client.stream("POST", path, json=body, headers={"last-event-id": event_id}) as response:
        return [pair async for pair in messages(response)]
