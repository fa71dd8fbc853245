"""An agent that speaks OpenAI's protocol by the standard library alone, since each episode of a test starts one.

It asks three times, and answers with the number of the turn and the first digits in it. A request whose connection
breaks is sent again, as OpenAI's own library does. With `stuck`, it never ends for a prompt that begins with 9.
"""

import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit

ADDRESS = urlsplit(os.environ["OPENAI_BASE_URL"])
RETRIES = 2


def asked(body: str) -> str:
    """Return the policy's answer to a request. Raises OSError or HTTPException when the gateway is gone."""
    for retry in range(RETRIES + 1):
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "x-stainless-retry-count": str(retry)}
        connection = http.client.HTTPConnection(ADDRESS.hostname or "", ADDRESS.port)
        try:
            connection.request("POST", f"{ADDRESS.path}/chat/completions", body, headers)
            answer = connection.getresponse()
            if answer.status == 200:
                return str(json.loads(answer.read())["choices"][0]["message"]["content"] or "")
            raise SystemExit(f"the gateway answered {answer.status}: {answer.read()!r}")
        except (OSError, http.client.HTTPException):
            if retry == RETRIES:
                raise
        finally:
            connection.close()
        time.sleep(0.1)
    raise AssertionError


def main() -> None:
    prompt = json.loads(os.environ["EVENKEEL_TASK"])["prompt"]
    while sys.argv[1:] == ["stuck"] and prompt.startswith("9"):
        time.sleep(60)
    messages, reward = [{"role": "user", "content": prompt}], 0.0
    for turn in (1, 2, 3):
        said = asked(json.dumps({"model": "policy", "messages": messages}))
        digits = "".join(filter(str.isdigit, said))
        reward += len(digits) / max(1, len(said)) / 3
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{turn}{digits[:3]}"}]
    print(json.dumps({"reward": reward}))


main()
