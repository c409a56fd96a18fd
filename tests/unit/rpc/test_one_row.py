"""A plain sampling parameter is one row and one field of the proto file: bodies, gRPC form, SDK, docs and checks follow.
Beam search, which does not use it, rejects it by name.

Shown with a parameter that does not exist, in a copy of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("client", "common", "kernels", "router", "rpc")
TYPES = "diptych/rpc/v1/types.proto"
ROW = '    top_a: float = row(0.0, Number(0.0, 0.5), "drawing", "0 (off) to 0.5", since="9.9")\n'
FIELD = "  // As min_p, by the square of the likeliest token's probability.\n  optional double top_a = 999;\n"
ANSWERS = """
from diptych.client.request import build_request
from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SAMPLING, SamplingParams, check_sampling
from diptych.router.api.grpc.requests import spec_from
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.api.openai.responses import responses_call
from diptych.router.requests.messages import ModelFeatures
from diptych.rpc.convert import sampling_from_proto, sampling_to_proto

features, refused = ModelFeatures(), UnknownFields(refuse=True)
params = SamplingParams(4, top_a=0.25)
print(sampling_from_proto(sampling_to_proto(params), vocab_size=9) == params)
print(spec_from(build_request({"prompt": "a", "top_a": 0.25}), 5.0, features)[0].sampling["top_a"])
messages = [{"role": "user", "content": "a"}]
for call, body in (chat_call, {"messages": messages}), (completion_call, {"prompt": "a"}), (responses_call, {"input": "a"}):
    print(call({**body, "top_a": 0.25}, features=features, unknown=refused).spec.sampling["top_a"])
try:
    check_sampling(vocab_size=9, top_a=0.75)
except InvalidRequestError as error:
    print(error.param)
try:
    check_sampling(vocab_size=9, beam_width=2, temperature=0.0, top_a=0.25)
except InvalidRequestError as error:
    print(error.param)
"""


def insert(path: Path, before: str, text: str) -> None:
    whole = path.read_text("utf-8")
    assert whole.count(before) == 1
    path.write_text(whole.replace(before, text + before), "utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy with the row and the proto field."""
    (tmp_path / "src" / "diptych").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "diptych" / "__init__.py", tmp_path / "src" / "diptych")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "src" / "diptych" / name).symlink_to(Path("..", "..", name))
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / "docs").mkdir()
    for name in ("make_sampling.py", "api.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    insert(tmp_path / "common" / "sampling.py", "# fmt: on\n", ROW)
    insert(tmp_path / "proto" / TYPES, "  // When beam search ends.\n", FIELD)
    return tmp_path


def test_a_scalar_parameter_is_one_row_and_one_proto_field(checkout: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}

    def python(*args: str) -> list[str]:
        ran = subprocess.run(
            [sys.executable, *args], cwd=checkout, env=env, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    python("-m", "grpc_tools.protoc", "-Iproto", "--python_out=src", "--pyi_out=src", f"proto/{TYPES}")  # make proto
    python("docs/make_sampling.py")  # make sdk-reference
    assert "    top_a: float | None\n" in (checkout / "client" / "sampling_options.py").read_text("utf-8")
    assert "| `top_a` | number | 0 | 0 (off) to 0.5; since 9.9 |" in (checkout / "docs" / "api.md").read_text("utf-8")
    assert python("-c", ANSWERS) == ["True", "0.25", "0.25", "0.25", "0.25", "top_a", "top_a"]
