"""An agent that knows nothing of training: a base URL, a key and a task come by its environment.

episode:
  command: [python, ops/examples/agents/openai_agent.py]
"""

import json
import os

from openai import OpenAI

from pipeline.episodes.toolbox import calculated  # a calculator; any tool of yours will do

PYTHON = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": json.loads(os.environ["EVENKEEL_TASK"])["prompt"]}]
while True:
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[PYTHON]).choices[0].message
    if not answer.tool_calls:
        break  # the task's reward scores the last message
    messages.append(answer.model_dump(exclude_none=True))
    for call in answer.tool_calls:
        result, _ = calculated(json.loads(call.function.arguments)["code"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
