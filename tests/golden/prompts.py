"""The prompts of the reference ids: varied in kind, language and length, and placed on the borders of the KV cache.

A block is 16 tokens and a prefill chunk at most about 100 on a CPU: prompts named `long_*` have more than 320, and
`num_tokens` cuts a prompt to an exact length (whole blocks, one more, one less).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class GoldenPrompt(NamedTuple):
    """Either `text` (a completion) or `messages` (a chat). `num_tokens`: length to which the ids are cut."""

    name: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    ignore_eos: bool = False
    num_tokens: int | None = None


def user(content: str, system: str | None = None) -> tuple[dict[str, Any], ...]:
    head = ({"role": "system", "content": system},) if system else ()
    return (*head, {"role": "user", "content": content})


_STORY = """The lighthouse keeper had not spoken to another soul for eleven days when the boat came. It came out of the fog
without a sound, its sails furled and its lanterns dark, and it touched the landing as gently as a leaf touches water. Nobody
stood at the tiller. Nobody coiled the ropes. The keeper, whose name was Maren, set down her cup of tea and went outside with
her lamp held high, for she had been taught that a keeper goes to every boat, no matter the hour and no matter the weather.

On the deck she found three things. The first was a wooden chest, bound with copper, and locked. The second was a bird cage
with its door standing open, and in it a single grey feather. The third was a letter, sealed with blue wax, and on the outside
of it, in a hand that she knew as well as her own, was written her name. Maren sat down on the wet planks. The hand was that of
her brother, who had sailed north nine years before to map the islands beyond the ice, and who had never been heard of again.
She turned the letter over and over. The wax was fresh. It still smelled of the candle. She looked up at the fog, and the fog
looked back at her, and somewhere far out in it a bell began to ring, slowly, as bells are rung for the drowned. Then she broke
the seal, unfolded the paper, and by the light of her lamp she read what her brother had to tell her:"""

_CODE = '''"""A small inventory service."""

from dataclasses import dataclass, field
from typing import Dict, List, Optional


@dataclass
class Item:
    sku: str
    name: str
    quantity: int = 0
    price_cents: int = 0
    tags: List[str] = field(default_factory=list)


class OutOfStock(Exception):
    pass


class Inventory:
    def __init__(self) -> None:
        self._items: Dict[str, Item] = {}

    def add(self, item: Item) -> None:
        if item.sku in self._items:
            self._items[item.sku].quantity += item.quantity
        else:
            self._items[item.sku] = item

    def find(self, sku: str) -> Optional[Item]:
        return self._items.get(sku)

    def remove(self, sku: str, quantity: int) -> None:
        item = self.find(sku)
        if item is None:
            raise KeyError(sku)
        if item.quantity < quantity:
            raise OutOfStock(f"{sku}: {item.quantity} left, {quantity} wanted")
        item.quantity -= quantity
        if item.quantity == 0:
            del self._items[sku]

    def with_tag(self, tag: str) -> List[Item]:
        return sorted((item for item in self._items.values() if tag in item.tags), key=lambda item: item.sku)

    def total_value_cents(self) -> int:
        """Sum of price times quantity over all items."""
'''

_CHINESE = (
    "从前，在一座高山脚下有一个小村庄。村子里住着一位老木匠，他的手艺远近闻名。每天清晨，他都会走进森林，挑选最好的木头，"
    "然后回到他的小屋里工作。他做桌子、椅子、门窗，也给孩子们做玩具。孩子们都很喜欢他，因为他总是一边工作，一边讲故事。"
    "有一年冬天，大雪下了整整七天，道路被封住了，村里的粮食也快吃完了。老木匠想了一个办法：他用最轻的木头做了一只大雪橇，"
    "让年轻人拉着它翻过山去买粮食。三天以后，雪橇满载着大米和面粉回来了。从那以后，村里的人都叫他“雪橇爷爷”。请继续讲这个故事："
)

_LOG = "\n".join(
    f"2026-03-{1 + i % 28:02d} {i % 24:02d}:{7 * i % 60:02d}:{13 * i % 60:02d} worker-{i % 5} "
    f"{('INFO', 'WARN', 'INFO', 'ERROR')[i % 4]} request {1000 + 37 * i} took {3 + 11 * i % 97} ms"
    for i in range(22)
)

_TALK: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "You are a patient teacher. Answer in short, plain sentences."},
    {"role": "user", "content": "Why is the sky blue during the day but red in the evening?"},
    {
        "role": "assistant",
        "content": "Sunlight is made of all colours. Air scatters blue light much more than red light. During the day "
        "scattered blue light reaches you from every part of the sky. In the evening the light has to cross much more air, "
        "most of the blue is scattered away on its long path, and the red light is what remains.",
    },
    {"role": "user", "content": "So why is the sky not violet? Violet light is scattered even more than blue light."},
    {
        "role": "assistant",
        "content": "That is a very good question. There are three reasons. The sun sends out less violet light than blue "
        "light. Some of the violet light is absorbed high up in the atmosphere. And our eyes are less sensitive to violet "
        "than to blue. Together this makes the sky look blue to us, although a little violet is mixed in.",
    },
    {
        "role": "user",
        "content": "And what would the sky look like on the Moon, where there is no air at all? Would the stars be visible "
        "during the day? Please explain it so that a child of eight years can understand it, and give me one simple "
        "experiment with a glass of water, a few drops of milk and a torch that shows how scattering works. Tell me also what I "
        "should look for in the glass from the side and from the end, and why the two look different. "
        "Then ask me one question back, to see whether I understood.",
    },
)

_ESSAY = " ".join(
    f"In the {place} of the old city the {thing} was always the first to wake, and those who lived there said that it "
    f"{habit}, whatever the season and whatever the year."
    for place, thing, habit in (
        ("north", "baker", "knew the price of flour before the miller did"),
        ("south", "ferryman", "could read the river as others read a book"),
        ("east", "clockmaker", "wound four hundred springs before breakfast"),
        ("west", "gardener", "spoke to the roses in a language of its own"),
        ("centre", "judge", "weighed a silence as carefully as a word"),
        ("harbour", "pilot", "trusted the gulls more than the charts"),
        ("market", "spice seller", "measured saffron with closed eyes"),
        ("castle", "cook", "never tasted a soup and never spoiled one"),
        ("library", "copyist", "left one letter out of every thousandth line"),
        ("tower", "bell ringer", "counted the hours backwards in winter"),
    )
)

PROMPTS: tuple[GoldenPrompt, ...] = (
    GoldenPrompt("chat_capital", messages=user("What is the capital of France?")),
    GoldenPrompt("chat_system", messages=user("Who are you?", system="You are a pirate. Answer in one sentence.")),
    GoldenPrompt("chat_sum", messages=user("What is 17 + 25?")),
    GoldenPrompt("chat_haiku", messages=user("Write a haiku about the sea.")),
    GoldenPrompt("chat_code", messages=user("Write a Python function that reverses a string.")),
    GoldenPrompt("chat_chinese", messages=user("请用一句话介绍北京。")),
    GoldenPrompt("chat_emoji", messages=user("What do these emoji mean? 🎉🐍🚀👩‍👩‍👧‍👦")),
    GoldenPrompt("chat_joke", messages=user("Tell me a joke about a cat.")),
    GoldenPrompt("long_chat", messages=_TALK),
    GoldenPrompt(
        "long_log", messages=user(f"Here is a log:\n{_LOG}\nHow many errors does it hold, and which worker is slow?")
    ),
    GoldenPrompt("text_fact", text="The speed of light in a vacuum is"),
    GoldenPrompt("one_token", text="The", ignore_eos=True),
    GoldenPrompt("two_tokens", text="Once upon"),
    GoldenPrompt("text_code", text="def fibonacci(n):\n    ", ignore_eos=True),
    GoldenPrompt("text_json", text='{"name": "Ada", "born": 1815, "languages": ["', ignore_eos=True),
    GoldenPrompt("text_japanese", text="むかしむかし、あるところに、おじいさんと", ignore_eos=True),
    GoldenPrompt("text_emoji", text="🙂🙃🙂🙃🙂", ignore_eos=True),
    GoldenPrompt("chat_ignoring_eos", messages=user("What is 17 + 25?"), ignore_eos=True),
    GoldenPrompt("block_15", text=_ESSAY, num_tokens=15),
    GoldenPrompt("block_16", text=_STORY, ignore_eos=True, num_tokens=16),
    GoldenPrompt("block_17", text=_ESSAY, num_tokens=17),
    GoldenPrompt("block_64", text=_ESSAY, num_tokens=64),
    GoldenPrompt("block_128", text=_STORY, ignore_eos=True, num_tokens=128),
    GoldenPrompt("long_story", text=_STORY),
    GoldenPrompt("long_code", text=_CODE, ignore_eos=True),
    GoldenPrompt("long_chinese", text=_CHINESE),
    GoldenPrompt("long_essay_blocks", text=_ESSAY, ignore_eos=True, num_tokens=336),
)
