"""LangChain's ChatOpenAI against a server. Arguments: base URL, model. Prints the results as JSON."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
ASK = [SystemMessage("You are a helpful AI assistant."), HumanMessage("What is the capital of France?")]
SETTINGS = {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 120}
reported = {"requests": 0, "tokens": 0, "texts": {}}


class Place(BaseModel):
    city: str


def count(message) -> None:
    reported["requests"] += 1
    reported["tokens"] += message.usage_metadata["output_tokens"]


chat = ChatOpenAI(max_tokens=16, **SETTINGS)
answer = chat.invoke(ASK)
count(answer)
reported["texts"]["chat"] = answer.content

whole = None
for chunk in ChatOpenAI(max_tokens=16, stream_usage=True, **SETTINGS).stream(ASK):
    whole = chunk if whole is None else whole + chunk
count(whole)
reported["texts"]["stream"] = whole.content

for message in chat.batch([ASK, ASK, ASK]):
    count(message)
    assert message.content == reported["texts"]["chat"]

formed = (
    ChatOpenAI(max_tokens=48, **SETTINGS)
    .with_structured_output(Place, method="json_schema", include_raw=True)
    .invoke(ASK)
)
count(formed["raw"])
reported["texts"]["formed"] = formed["parsed"].city

reported["texts"]["completion"] = OpenAI(max_tokens=4, **SETTINGS).invoke("The capital of France is")
reported["requests"] += 1
reported["tokens"] += 4
print(json.dumps(reported))
