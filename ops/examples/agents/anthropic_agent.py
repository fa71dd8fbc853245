"""The agent of openai_agent.py over Anthropic's protocol.

episode:
  command: [python, ops/examples/agents/anthropic_agent.py]
"""

import json
import os

from anthropic import Anthropic

from pipeline.episodes.toolbox import calculated  # a calculator; any tool of yours will do

PYTHON = {
    "name": "python",
    "description": "",
    "input_schema": {"type": "object", "properties": {"code": {"type": "string"}}},
}
client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
messages = [{"role": "user", "content": json.loads(os.environ["EVENKEEL_TASK"])["prompt"]}]
while True:
    answer = client.messages.create(model="policy", max_tokens=8, messages=messages, tools=[PYTHON])
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break  # the task's reward scores the last message
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    results = [dict(type="tool_result", tool_use_id=one.id, content=calculated(one.input["code"])[0]) for one in calls]
    messages.append({"role": "user", "content": results})
