"""SGLang servers of a teacher, which score what a student sampled. Stock ones: nothing of ours is asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EngineUnavailableError, RecipeError, RetryableError
from precision.text import quoted
from rollout_sglang.client import EngineClient


class TeacherServers:
    """Asks them in turn; an attempt that failed is followed by one at another server."""

    def __init__(self, urls: Sequence[str], api_key: str | None, *, request_deadline_s: float) -> None:
        self._clients = [
            EngineClient(url, api_key, index=index, request_deadline_s=request_deadline_s)
            for index, url in enumerate(urls)
        ]
        self._turns = cycle(self._clients)

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See pipeline.ports.engines.Teacher. Raises FatalError when a server finds the call itself wrong, too."""
        try:
            return await next(self._turns).response_logprobs(prompt, responses)
        except RetryableError as error:
            raise EngineUnavailableError(f"the teacher did not score a group: {error}") from error

    async def require_same_tokenizer(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Raises RecipeError unless every server makes the ids of each text that the student's tokenizer makes of it,
        and EngineUnavailableError when one cannot be asked."""
        for client in self._clients:
            for text, ids in texts.items():
                theirs = await client.tokenize(text)
                if theirs != list(ids):
                    raise RecipeError(
                        f"the teacher at {client.url} has another tokenizer than model.path: of {quoted(text)} it "
                        f"makes {theirs[:8]}…, the student {list(ids)[:8]}…; distill from a model of the same tokenizer"
                    )

    async def close(self) -> None:
        """Release the connections."""
        for client in self._clients:
            await client.close()
