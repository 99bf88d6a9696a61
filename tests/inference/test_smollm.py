"""The default model, end to end, against transformers' own generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference import ChatMessage, Engine
from tests.inference.helpers import collect, request

QUESTIONS = [
    "What is the capital of France?",
    "And of Italy?",
    "Name three fruits.",
    "Write one short sentence about the sea.",
    "Say it in fewer words, please.",
]
ANSWER_TOKENS = 16


def converse(engine: Engine, session_id: str | None) -> list[tuple[list[int], tuple[int, ...], str]]:
    """Prompt, answer tokens and answer text of each turn. Without a session, nothing is found of the turns before."""
    turns = []
    messages: list[ChatMessage] = []
    for number, question in enumerate(QUESTIONS):
        messages.append(ChatMessage(f"q{number}", "user", question))
        spans = engine.chat_format.render(messages)
        owner = "owner" if session_id else f"owner of turn {number}"
        asked = request(spans, owner=owner, session_id=session_id, max_tokens=ANSWER_TOKENS)
        result = collect(engine.submit(asked))
        assert (result.end.usage.cached_tokens > 0) == (session_id is not None and number > 0)
        turns.append(([t for span in spans for t in span.tokens], result.tokens, result.text))
        messages.append(ChatMessage(f"a{number}", "assistant", result.text, result.tokens))
    return turns


def test_greedy_conversation_is_that_of_generate(
    smollm_engine: Engine, smollm_folder: Path, smollm_tokenizer: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm_folder)
    history: list[dict[str, str]] = []
    expected = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        prompt = smollm_tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER_TOKENS)
        tokens = tuple(t for t in output[0, len(prompt) :].tolist() if t != smollm_tokenizer.eos_token_id)
        text = smollm_tokenizer.decode(tokens)
        expected.append((list(prompt), tokens, text))
        history.append({"role": "assistant", "content": text})
    assert converse(smollm_engine, "cached") == expected
    assert converse(smollm_engine, None) == expected


@pytest.mark.parametrize("text", ["😀👩‍👩‍👧", "再见，世界"])
def test_an_answer_that_goes_on_within_a_character_shows_it_whole(
    smollm_engine: Engine, smollm_tokenizer: Any, text: str
) -> None:
    spans = smollm_engine.chat_format.render([ChatMessage("q", "user", "Repeat.")])
    tokens = smollm_tokenizer.encode(text)
    for cut in range(1, len(tokens) + 1):
        generated = tokens[:cut]
        result = collect(smollm_engine.submit(request(spans, generated=generated, max_tokens=cut + 4)))
        whole = smollm_tokenizer.decode([*generated, *result.tokens])
        assert whole.endswith(result.text)
        assert not any(event.text.endswith("\ufffd") for event in result.events)


def test_the_model_ends_its_turns(smollm_engine: Engine, smollm_tokenizer: Any) -> None:
    assert smollm_engine._model.end_tokens == {smollm_tokenizer.convert_tokens_to_ids("<|im_end|>")}
    spans = smollm_engine.chat_format.render([ChatMessage("q", "user", QUESTIONS[0])])
    result = collect(smollm_engine.submit(request(spans, max_tokens=40)))
    assert result.end.reason == "stop"
    assert "Paris" in result.text
    assert "<|" not in result.text
