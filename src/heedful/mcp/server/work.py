"""What the tools of heedful's MCP server do: from checked arguments to an answer and what it cost.

Nothing here knows the protocol. A call that is cancelled frees its pages before the engine's next step; what runs in a
thread (deciding, embedding) ends after the text, or batch of texts, that it is at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from heedful.cache.policy import PAGE_LEN
from heedful.cost.receipt import summed
from heedful.errors import BadParameter
from heedful.mcp.server.call import JSON, Call, Done
from heedful.mcp.server.fetch import Fetching
from heedful.mcp.server.files import Roots
from heedful.mcp.server.models import ServedModels
from heedful.mcp.server.summary import MAX_QUOTE_CHARS, Summarizer, Tell, central, sentences
from heedful.request import CachePolicy, GrammarSpec, Request, SamplingParams

if TYPE_CHECKING:
    from heedful.cost.formulas import Shape
    from heedful.decide.answer import Answers
    from heedful.engine.answer import Completion
    from heedful.engine.embedder import EmbeddingBatch
    from heedful.engine.llm import LLM
    from heedful.engine.service import Service
    from heedful.sampling.grammar import Grammar

MAX_TOKENS = 8192
MAX_SUMMARY_TOKENS = 1024
MAX_QUESTIONS = 32
MAX_CLASSIFIED = 256
MAX_LABELS = 64
MAX_EMBEDDED = 256
EMBEDDED_AT_ONCE = 16
DEFAULT_TOKENS, DEFAULT_SUMMARY_TOKENS = 256, 200
MAX_QUOTES = 5
_AGAINST_LOOPS = 0.5
"""Frequency penalty: greedy small models say a sentence again and again."""
_TEMPLATE_SLACK = 8
"""Tokens: a text that was cut may take some more when it is encoded again, between other words."""


class Work:
    def __init__(self, models: ServedModels, roots: Roots) -> None:
        self.models = models
        self.roots = roots
        self._fetching = Fetching()
        self._judged = dict.fromkeys(("calls", "prompt_tokens", "visits", "joules"), 0.0)
        """What decisions and vectors have cost together."""

    # ---- Text -----------------------------------------------------------------------------------------------------

    async def generate(self, arguments: JSON, call: Call) -> Done:
        await self._fetching.agree(call, self.models.names.generator)
        service = await self.models.generator()
        params = SamplingParams(
            max_tokens=arguments.get("max_tokens", DEFAULT_TOKENS),
            temperature=arguments.get("temperature", 0.0),
            seed=arguments.get("seed"),
            stop=tuple(arguments.get("stop", ())),
        )
        ids, dropped = await asyncio.to_thread(_prompt_ids, service.llm, arguments, params)
        grammar = await self._grammar(arguments.get("json_schema"))
        most = params.max_tokens

        async def tell(tokens: int) -> None:
            await call.report(tokens, most, f"{tokens} of at most {most} tokens")

        completion = await written(service, ids, params, tell, grammar=grammar)
        structured = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(ids),
            "output_tokens": len(completion.token_ids),
            "dropped_tokens": dropped,
            "model": service.llm.name,
        }
        if grammar is not None and completion.finish_reason == "stop":
            structured["json"] = json.loads(completion.text)
        return Done(structured, completion.text, completion.receipt.to_dict())

    async def summarize(self, arguments: JSON, call: Call) -> Done:
        path, most = arguments["path"], arguments.get("max_tokens", DEFAULT_SUMMARY_TOKENS)
        text = await asyncio.to_thread(self.roots.read_text, path)
        await self._fetching.agree(call, self.models.names.generator, self.models.names.embedder)
        service = await self.models.generator()

        async def write(prompt: str, most_tokens: int, tell: Tell) -> Completion:
            params = SamplingParams(max_tokens=most_tokens, frequency_penalty=_AGAINST_LOOPS)
            asked = {"prompt": prompt, "system": "You summarize texts. You are brief."}
            ids, _ = await asyncio.to_thread(_prompt_ids, service.llm, asked, params)
            return await written(service, ids, params, tell)

        summarizer = Summarizer(write, _counter(service.llm), _room(service.llm, most), call.report)
        found = await summarizer.summary(text, most, arguments.get("focus"))
        quotes, receipt = await self._quotes(text, arguments.get("focus"))
        structured = {
            "summary": found.text,
            "quotes": quotes,
            "path": path,
            "chars": len(text),
            "tokens": found.tokens,
            "pieces": found.pieces,
            "finish_reason": found.finish_reason,
            "model": service.llm.name,
        }
        told = "\n".join(["In the file's own words:", *quotes, f"Summary by {service.llm.name}:", found.text])
        self._book(receipt)
        return Done(structured, told, {**summed(found.receipts), "quotes": receipt})

    async def _quotes(self, text: str, focus: str | None) -> tuple[list[str], JSON]:
        """Sentences that all of it, or what is asked about, is nearest to; and what finding them cost."""
        import numpy as np

        candidates = sentences(text) or [" ".join(text.split())[:MAX_QUOTE_CHARS]]
        batches = [batch async for batch in self._embedded([*candidates, *([focus] if focus else [])], truncate=True)]
        vectors = np.concatenate([batch.vectors for batch in batches])
        about = vectors[-1] if focus else None
        rows = central(vectors[: len(candidates)], about, MAX_QUOTES)
        return [candidates[row] for row in rows], summed([batch.receipt.to_dict() for batch in batches])

    async def _grammar(self, schema: JSON | None) -> Grammar | None:
        if schema is None:
            return None
        grammars = await self.models.grammars()
        return await asyncio.to_thread(grammars.compile, GrammarSpec("json_schema", json.dumps(schema)), "json_schema")

    # ---- Decisions and vectors ------------------------------------------------------------------------------------

    async def decide(self, arguments: JSON, call: Call) -> Done:
        from heedful.decide.ask import questions_from
        from heedful.decide.question import check_state

        check_state(arguments["state"])
        questions = questions_from(arguments["questions"])
        await self._fetching.agree(call, self.models.names.decider)
        answers = await self._decided(arguments["state"], questions)
        receipt = answers.receipt.to_dict()
        self._book(receipt)
        shown = {name: _rounded(answer.to_dict()) for name, answer in answers.items()}
        return Done({"answers": shown, "model": answers.model}, receipt=receipt)

    async def classify(self, arguments: JSON, call: Call) -> Done:
        from heedful.decide.answer import ChoiceAnswer
        from heedful.decide.question import Choice

        question = Choice("label", arguments["labels"], arguments.get("instructions"))
        texts, classes, receipts, model = arguments["texts"], [], [], ""
        await self._fetching.agree(call, self.models.names.decider)
        for number, text in enumerate(texts):
            answers = await self._decided(text, (question,))
            answer, model = answers["label"], answers.model
            assert isinstance(answer, ChoiceAnswer), answer
            shares = _rounded(dict(answer.probabilities))
            classes.append({"label": answer.choice, "p": shares[answer.choice], "probabilities": shares})
            receipts.append(answers.receipt.to_dict())
            await call.report(number + 1, len(texts), f"{number + 1} of {len(texts)} texts")
        receipt = summed(receipts)
        self._book(receipt)
        return Done({"classes": classes, "model": model}, receipt=receipt)

    async def _decided(self, state: Any, questions: tuple[Any, ...]) -> Answers:
        decider = await self.models.decider()
        async with self.models.turn():
            return await asyncio.to_thread(decider.decide, state, questions)

    async def embed(self, arguments: JSON, call: Call) -> Done:
        import numpy as np

        query, truncate = arguments.get("query"), arguments.get("truncate", True)
        texts = [*([query] if query is not None else []), *arguments["texts"]]
        await self._fetching.agree(call, self.models.names.embedder)
        embedder = await self.models.embedder()
        vectors, dropped, receipts, done = [], 0, [], 0
        async for batch in self._embedded(texts, truncate=truncate):
            vectors.append(batch.vectors)
            dropped += sum(batch.dropped_tokens)
            receipts.append(batch.receipt.to_dict())
            done += len(batch.vectors)
            await call.report(done, len(texts), f"{done} of {len(texts)} texts")
        receipt = summed(receipts)
        self._book(receipt)
        every = np.concatenate(vectors)
        structured = {"dimensions": embedder.dimensions, "dropped_tokens": dropped, "model": embedder.name}
        if query is None:
            structured["vectors"] = [[round(float(number), 6) for number in vector] for vector in every]
        else:
            structured["ranking"] = _ranking(every[1:] @ every[0], arguments.get("top"))
        return Done(structured, receipt=receipt)

    async def _embedded(self, texts: Sequence[str], *, truncate: bool) -> AsyncIterator[EmbeddingBatch]:
        embedder = await self.models.embedder()
        for start in range(0, len(texts), EMBEDDED_AT_ONCE):
            some = texts[start : start + EMBEDDED_AT_ONCE]
            async with self.models.turn():
                batch = await asyncio.to_thread(partial(embedder.embed, some, truncate=truncate))
            yield batch

    # ---- Cost -----------------------------------------------------------------------------------------------------

    async def cost(self, arguments: JSON, call: Call) -> Done:
        from heedful.cost.formulas import generation_cost
        from heedful.cost.paper import page_policy

        prompt, output = arguments.get("prompt_tokens"), arguments.get("output_tokens", DEFAULT_TOKENS)
        if (prompt is None) == ("text" not in arguments):
            raise BadParameter("prompt_tokens", "or text must be given, and not both")
        policy = CachePolicy(
            kv_format=arguments.get("kv"), window=arguments.get("window"), sinks=arguments.get("sinks", 0)
        )
        shape, context = await self._dimensions(call)
        if prompt is None:
            await self._fetching.agree(call, self.models.names.generator)
            service = await self.models.generator()
            prompt = len(await asyncio.to_thread(service.llm.tokenizer.encode, arguments["text"])) or 1
        found = generation_cost(shape, prompt, output, policy=page_policy(policy))
        known = {
            "kv_bytes_read": found.kv_bytes_read,
            "kv_bytes_held": found.kv_bytes_held,
            "flops": {name: count for name, count in found.flops.items() if count is not None},
        }
        return Done(
            {
                "model": self.models.names.generator,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "context": context,
                "fits": policy.window is not None or prompt + output <= context,
                "visits": found.visits,
                "dense_visits": found.dense_visits,
                "saved": found.saved,
                **{name: count for name, count in known.items() if count is not None},
                "spent": self._spent(),
            }
        )

    async def _dimensions(self, call: Call) -> tuple[Shape, int]:
        """And the context. Without loading a model that is known by its name."""
        from heedful.cost.formulas import Shape
        from heedful.cost.shapes import KNOWN

        known = KNOWN.get(self.models.names.generator)
        if known is not None and known.causal and known.context_len is not None:
            return known.shape(), known.context_len
        await self._fetching.agree(call, self.models.names.generator)
        llm = (await self.models.generator()).llm
        return Shape.from_config(llm.config), llm.context_len

    def _book(self, receipt: Mapping[str, Any]) -> None:
        spent = (1, receipt["prompt_tokens"], receipt["visits"]["total"], receipt["energy"]["joules"])
        for key, amount in zip(self._judged, spent, strict=True):
            self._judged[key] += amount

    def _spent(self) -> JSON:
        running = self.models.running
        return {"generated": None if running is None else asdict(running.llm.ledger), "judged": dict(self._judged)}


async def written(
    service: Service, ids: Sequence[int], params: SamplingParams, tell: Tell, *, grammar: Grammar | None = None
) -> Completion:
    """Raises what Service.open does, and what ended the answer."""
    stream = await service.open(Request(tuple(ids), params, service.llm.policy), grammar=grammar)
    tokens = 0
    try:
        async for piece in stream:
            tokens += len(piece.token_ids)
            await tell(tokens)
    finally:
        stream.close()  # whoever called may have left in the middle of a report
    return stream.completion


def _prompt_ids(llm: LLM, arguments: JSON, params: SamplingParams) -> tuple[list[int], int]:
    """Token ids, and how many of the prompt were dropped. A base model continues system and prompt as they are."""
    prompt, system = arguments["prompt"], arguments.get("system")

    def encoded(text: str) -> list[int]:
        if llm.tokenizer.chat_template is None:
            return llm.tokenizer.encode("\n\n".join(filter(None, (system, text))))
        head = [{"role": "system", "content": system}] if system else []
        return llm.encode_chat([*head, {"role": "user", "content": text}])

    if not arguments.get("truncate", False):
        return encoded(prompt), 0
    room = llm.prompt_room(params, llm.policy) - len(encoded("")) - _TEMPLATE_SLACK
    ids = llm.tokenizer.encode(prompt, add_bos=False)
    if len(ids) <= room:
        return encoded(prompt), 0
    kept = ids[len(ids) - max(1, room) :]
    return encoded(llm.tokenizer.decode(kept)), len(ids) - len(kept)


def _rounded(shown: JSON) -> JSON:
    """Four digits: whoever reads them pays for each, and no calibration is better."""
    return {
        key: round(value, 4) if isinstance(value, float) else _rounded(value) if isinstance(value, dict) else value
        for key, value in shown.items()
    }


def _counter(llm: LLM) -> Any:
    return lambda text: len(llm.tokenizer.encode(text, add_bos=False))


def _room(llm: LLM, answer_tokens: int) -> int:
    """Tokens of text that a prompt may have beside an answer, the template and some words around it."""
    return llm.engine.longest(llm.policy) - answer_tokens - 8 * PAGE_LEN


def _ranking(similarities: Any, top: int | None) -> list[JSON]:
    order = sorted(range(len(similarities)), key=lambda index: -float(similarities[index]))
    return [{"index": index, "similarity": round(float(similarities[index]), 6)} for index in order[:top]]
