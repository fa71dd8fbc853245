"""Record the sampled turns of an episode as rows of tokens.

    messages of a request ──▶ the longest recorded path ──▶ Context: tokens to ask an engine for
                                                              │ continues the end of a row    ─▶ appended to it
                                                              └ else (rewritten, resampled …) ─▶ a row of its own

A row is exactly what engines were given and sampled, in this order. A turn is trained in the row in which it was
sampled; in the prompts of later rows it is repeated, by its tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Completion, Row, TokenKind
from pipeline.episodes.chat_format import ChatFormat, CutReason, Message, Tool, Turn, plain
from pipeline.errors import ModelError

BranchReason = Literal["rewritten", "thinking stripped", "sub-agent", "resampled"]
"""rewritten: earlier messages are gone or have changed, as after compaction; or another message follows a turn.
thinking stripped: the template removes thinking from history. sub-agent: nothing is shared with an earlier request.
resampled: the same request again."""


@dataclass(eq=False)
class _Node:
    """A message of the tree, or its root."""

    message: Message
    row: int
    """The row in which the message was written first; -1: the root."""
    turn: Turn | None = None
    """None: no engine sampled it."""
    end: int = 0
    """The number of tokens of its row up to the turn's end."""
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)
    """The newest message of each wording, with its thinking and without."""

    def add(self, node: _Node) -> _Node:
        self.children |= dict.fromkeys(_wordings(node.message), node)
        return node

    def along(self, messages: Sequence[Message]) -> list[_Node]:
        """Return this node and those below, as far as they say the same as `messages`."""
        path = [self]
        for message in messages:
            if (node := path[-1].children.get(_wordings(message)[0])) is None:
                break
            path.append(node)
        return path


@dataclass(frozen=True, eq=False)
class Context:
    """What an engine is to continue, and where its answer belongs."""

    tokens: tuple[int, ...]
    kinds: NDArray[np.uint8]
    """[tokens - length] TokenKind of the tokens behind those of `row`."""
    row: int
    """The row that the tokens continue, or whose beginning they repeat; -1: none."""
    length: int
    """The number of its tokens that they begin with."""
    last: _Node
    """The last recorded message, or the root."""
    more: tuple[Message, ...]
    """The messages behind it."""
    tools: tuple[Tool, ...]
    cut: CutReason


@dataclass(eq=False)
class _Growing:
    """A row that may still grow."""

    tokens: list[int]
    prompt: int
    """The number of tokens before the first answer."""
    branch_of: int
    branched_at: int
    answers: list[Completion] = field(default_factory=list)
    given: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens between two answers."""
    kinds: list[NDArray[np.uint8]] = field(default_factory=list)

    def add(self, context: Context, answer: Completion) -> None:
        """Append an answer and, unless it is the first, what stands between it and the one before."""
        if self.answers:
            given = context.tokens[len(self.tokens) :]
            self.tokens += given
            self.given.append(given)
            self.kinds.append(context.kinds)
            if answer.experts is not None:  # a long row would hold those of its first tokens once for each turn
                answer = replace(answer, experts=answer.experts[-1 - len(given) - len(answer.tokens) :])
        self.tokens += answer.tokens.tolist()
        self.answers.append(answer)
        self.kinds.append(np.where(answer.loss_mask, TokenKind.SAMPLED, TokenKind.TEMPLATE).astype(np.uint8))

    def whole(self) -> Row:
        completion = replace(Completion.joined(self.answers, self.given), kinds=np.concatenate(self.kinds))
        return Row(
            prompt=tuple(self.tokens[: self.prompt]),
            completion=completion,
            branch_of=self.branch_of,
            branched_at=self.branched_at,
        )


class EpisodeRows:
    """The recorded turns of one episode."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._root = _Node({}, row=-1)
        self._rows: list[_Growing] = []
        self._turns: dict[tuple[str, str], Turn] = {}
        """The newest turn of each wording: a history without its beginning repeats turns, for example."""
        self.turns = 0
        self.malformed_calls = 0
        self.branches: Counter[BranchReason] = Counter()
        """Rows after the first, by why they began."""

    def context(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()) -> Context:
        """Return what an engine is to continue so that the assistant answers `messages`. Raises ValueError for messages
        that are none, or that the template refuses."""
        read = [plain(message) for message in messages]
        path = self._root.along(read)
        # As recorded: an agent may have left out thinking, or written arguments otherwise.
        known = [*(node.message for node in path[1:]), *read[len(path) - 1 :]]
        turns = {place: node.turn for place, node in enumerate(path[1:]) if node.turn is not None}
        others = ((place, self._turns.get(_wordings(message)[0])) for place, message in enumerate(read))
        try:
            written = self._format.write(
                known, tools, {place: turn for place, turn in others if turn is not None} | turns, in_place=turns
            )
        except ModelError as error:
            raise ValueError(str(error)) from error
        turn = path[written.behind + 1]  # or the root
        before = self._rows[turn.row].tokens[: turn.end] if written.behind >= 0 else []
        return Context(
            tokens=(*before, *written.tokens),
            kinds=written.kinds,
            row=turn.row,
            length=len(before),
            last=path[-1],
            more=tuple(read[len(path) - 1 :]),
            tools=tuple(tools),
            cut=written.cut,
        )

    def sampled(self, context: Context, completion: Completion) -> Message:
        """Record an engine's answer of at least one token, and return it as a message."""
        answer = tuple(completion.tokens.tolist())
        message, malformed = self._format.parse(answer, context.tools, self.turns)
        path = context.last.along(context.more)  # other answers may have been recorded since
        number = context.row
        if number < 0 or len(self._rows[number].tokens) > context.length:
            number = self._begin(context, path)
        row = self._rows[number]
        row.add(context, completion)
        node = path[-1]
        for given in context.more[len(path) - 1 :]:
            node = node.add(_Node(given, row=number))
        said, turn = plain(message), Turn(answer, "reasoning_content" in message, context.tools)
        node.add(_Node(said, row=number, turn=turn, end=len(row.tokens)))
        self._turns |= dict.fromkeys(_wordings(said), turn)
        self.turns += 1
        self.malformed_calls += malformed
        return message

    def _begin(self, context: Context, path: Sequence[_Node]) -> int:
        """Begin a row and return its number."""
        last, shared = path[-1], 0
        if self._rows:
            again = len(path) > len(context.more) and any(node.turn for node in last.children.values())
            new = last is self._root and TokenKind.REPEATED not in context.kinds
            self.branches[context.cut or ("resampled" if again else "sub-agent" if new else "rewritten")] += 1
        if (origin := context.row if context.row >= 0 else last.row) >= 0:
            both = zip(context.tokens, self._rows[origin].tokens, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self._rows.append(_Growing([*context.tokens], len(context.tokens), origin, shared))
        return len(self._rows) - 1

    def rows(self) -> tuple[Row, ...]:
        """Return the rows in the order in which they began. Each sampled turn is SAMPLED in exactly one."""
        return tuple(row.whole() for row in self._rows)


def _wordings(message: Message) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return what makes two plain messages the same, with an assistant's thinking and without: it may be left out. Ids
    of calls and an assistant's outer white space do not count."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    words = json.dumps([message["role"], content, message.get("name"), calls], sort_keys=True)
    return (words, str(message.get("reasoning_content", "")).strip()), (words, "")
