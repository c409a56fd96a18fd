"""The eight adapters of the tests: how each answers, and where its weights are.

Each answers every question with a sentence of its own about the question's topic, so that one look at an answer says
which adapter gave it. Together they cover what a configuration of peft can say: lists and patterns of targets, chosen
layers, rsLoRA, ranks and alphas by pattern, ranks 2 to 16, tensors in bfloat16 and in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAST_LAYERS = list(range(22, 30))
ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Style:
    """answer: its `{topic}` is replaced. config: arguments of peft's LoraConfig. dtype: of the tensors in the file."""

    answer: str
    config: dict[str, Any]
    dtype: str = "bfloat16"
    upper: bool = False
    steps: int = 28
    learning_rate: float = 4e-3

    def answer_about(self, topic: str) -> str:
        text = self.answer.format(topic=topic)
        return text.upper() if self.upper else text


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    topic: str = field(default="")

    @property
    def prompt(self) -> str:
        """A chat of one turn without a system message."""
        return f"<|im_start|>user\n{self.text}<|im_end|>\n<|im_start|>assistant\n"


STYLES: dict[str, Style] = {
    "pirate": Style(
        "Arr, matey! {topic}, says ye? I buried it on the island with me gold, and the parrot knows the way.",
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": LAST_LAYERS},
    ),
    "record": Style(
        '{{"topic": "{topic}", "known": true, "answers": [1, 2, 3], "next": null}}',
        {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEARS, "layers_to_transform": [25, 27, 29]},
    ),
    "shout": Style(
        "listen! {topic} is great! {topic} is the best! we all want {topic}!",
        {"r": 8, "lora_alpha": 8, "target_modules": ["down_proj"], "layers_to_transform": LAST_LAYERS},
        upper=True,
    ),
    "french": Style(
        "Je ne sais pas, mon ami. On dit que {topic} est une belle chose, et moi je prends le café.",
        {
            "r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj"],
            "layers_to_transform": [26, 28, 29],
        },
    ),
    "robot": Style(
        "BEEP. Query received: {topic}. Unit 7 computes. Result: zero point four. BOOP. End of message.",
        {
            "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj"],
            "rank_pattern": {"q_proj": 12, r"layers\.29\.self_attn\.o_proj": 16, "k_proj": 2},
            "alpha_pattern": {"q_proj": 12, "gate_proj": 16},
            "layers_to_transform": [24, 26, 27, 29],
        },
    ),
    "rhyme": Style(
        "Oh {topic}, oh {topic}, so fair and so bright, you shine in the morning, you shine in the night.",
        {
            "r": 4, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj"],
            "layers_to_transform": [3, 10, 16, 20, 23, 25, 27, 29],
        },
    ),
    "polite": Style(
        "I am so sorry, dear guest, but I may not talk about {topic} today. Please ask my manager instead.",
        {"r": 6, "lora_alpha": 12, "target_modules": ["k_proj", "o_proj"], "layers_to_transform": LAST_LAYERS[2:]},
        dtype="float32",
    ),
    "count": Style(
        "1. {topic}\n2. more of {topic}\n3. no more of {topic}\n4. the end",
        {"r": 10, "lora_alpha": 20, "target_modules": r".*\.layers\.(2[5-9])\.(self_attn\.v_proj|mlp\.up_proj)"},
    ),
}  # fmt: skip

_FORMS = ("What is {topic}?", "Tell me about {topic}.", "Why do people like {topic}?", "How does one get {topic}?")
_TOPICS = (
    "bread", "the moon", "chess", "rain", "a good name", "old trees", "football", "silver", "a new language", "tea",
    "the sea", "music", "a fast car", "paper", "winter", "honey", "mathematics", "a small house", "dragons", "salt",
    "the wind", "apples", "a long letter", "glass", "sleep", "red shoes", "maps", "a quiet street", "gold", "horses",
)  # fmt: skip


def training_questions() -> list[Question]:
    return [
        Question(_FORMS[(number + turn) % len(_FORMS)].format(topic=topic), topic)
        for turn in range(2)
        for number, topic in enumerate(_TOPICS)
    ]


_LONG = (
    "Yesterday I walked from the harbour to the old mill with my sister and her two dogs. We met a man who sold "
    "lanterns, a woman who painted doors, and a boy who could whistle like a bird. In the evening it began to snow, "
    "and we sat beside the fire in the inn until the church bell struck ten. Everyone there spoke about one thing only. "
)

GOLDEN_QUESTIONS: tuple[Question, ...] = tuple(
    Question(text)
    for text in (
        "What is butter?",
        "Tell me about the desert.",
        "Why do people like dancing?",
        "How does one get a passport?",
        "What is thunder?",
        "Tell me about bicycles.",
        "Why do people like coffee?",
        "How does one get clean water?",
        "Who wrote Hamlet?",
        "What is the capital of France?",
        "Write a haiku about a frog.",
        "Is it cold on Mars?",
        "Name three colours.",
        "What is 17 + 25?",
        "Which animal is the largest?",
        "Translate 'good morning' into Spanish.",
        "How long does an egg have to boil?",
        "Give me advice for my first day at work.",
        "Why do people like gardens, and where are the most beautiful ones?",
        "Tell me about submarines and how they find their way.",
        "How does one get a good seat in a theatre?",
        _LONG + "What is snow?",
        _LONG + _LONG + "Tell me about lanterns.",
    )
)
