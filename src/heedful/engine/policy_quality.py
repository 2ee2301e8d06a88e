"""What a cache policy loses: the model reads a text twice in lockstep, with exact attention and under the policy.

    ids, text = passage_ids(tokenizer, context_len=8192, policies=policies)
    losses = measure_passage(runner, ids, policies, text=text)

The first half of the text is computed as a prompt is, the second token by token as an answer is, and each prediction
there is compared over the whole vocabulary. Both run on the same runner with the same weights, so what is found is the
policy's own doing and the runner's noise. That is measured too; with weights `in_float32` there is hardly any.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from heedful.cache.policy import PAGE_LEN, PRECISE_LEN, SPARSE_SINKS, SPARSE_WINDOW, STRIDE
from heedful.cache.policy_text import policy_name
from heedful.cost.quality import PassageLoss
from heedful.engine.haystack import sentences
from heedful.engine.lockstep import Lockstep, Progress
from heedful.engine.runner import Runner
from heedful.errors import BadLogits, BadParameter
from heedful.request import CachePolicy
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load import LoadedModel
from heedful.weights.tensor import StoredTensor, fold

EXACT = CachePolicy(kv_format="f32")
"""What policies are compared with."""
CONTROL = CachePolicy(kv_format="f16")
"""Changes the last bits only. Where a runner rounds activations to 8 bits, even that changes what is predicted, and by
how much is the noise in every other figure."""
FEWEST_TOKENS = 16


def measure_passage(
    runner: Runner,
    ids: ListLike[int],
    policies: ListLike[CachePolicy],
    *,
    text: str,
    progress: Progress = lambda positions: None,
) -> list[PassageLoss]:
    """One a policy. `text`: what the ids are, in words. Progress comes to (policies + 2) × (len(ids) - 1) positions.

    Raises BadParameter for a policy that the runner cannot carry out, CacheFull, BadLogits.
    """
    klds: list[npt.NDArray[np.float64]] = []
    losses, agreed = [], []
    for logits, target in predictions(runner, ids, [EXACT, CONTROL, *policies], progress=progress):
        logprobs = log_softmax(logits)
        klds.append(kld_from_first(logprobs))
        losses.append(-logprobs[:, target])
        best = logits.argmax(axis=-1)
        agreed.append(best[1:] == best[0])
    nll = np.array(losses)
    kld = np.array(klds).T
    columns = zip(kld, (nll[:, 1:] - nll[:, :1]).T, np.array(agreed).T, strict=True)
    return [_summary(*column, float(kld[0].mean()), text) for column in columns][1:]


def predictions(
    runner: Runner,
    ids: ListLike[int],
    policies: ListLike[CachePolicy],
    *,
    prompt_len: int | None = None,
    progress: Progress = lambda positions: None,
) -> Iterator[tuple[npt.NDArray[np.float32], int]]:
    """(logits (policies, vocab), the token that does come) for every id from `prompt_len` on; by default half."""
    begin = len(ids) // 2 if prompt_len is None else prompt_len
    with Lockstep(runner, policies, ids[:begin], longest=len(ids), progress=progress) as lockstep:
        logits = lockstep.prefill()
        for target, following in zip(ids[begin:], [*ids[begin + 1 :], None], strict=True):
            yield logits, target
            if following is not None:
                logits = lockstep.step([target] * len(policies))


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Along the last axis, in float64. Raises BadLogits."""
    if not np.isfinite(logits).all():
        raise BadLogits("the model computed logits that are not finite numbers", "The model's file may be damaged.")
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


def kld_from_first(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(R, vocab) → (R - 1,): KLD(first row || each other row) in nats."""
    klds: npt.NDArray[np.float64] = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[1:])).sum(axis=-1)
    return klds


def _summary(
    kld: npt.NDArray[np.float64],
    delta_nll: npt.NDArray[np.float64],
    agreed: npt.NDArray[np.bool_],
    noise_kld: float,
    text: str,
) -> PassageLoss:
    """Of arrays (predictions,)."""
    return PassageLoss(
        mean_kld=float(kld.mean()),
        p50_kld=float(np.percentile(kld, 50)),
        p99_kld=float(np.percentile(kld, 99)),
        max_kld=float(kld.max()),
        mean_delta_nll=float(delta_nll.mean()),
        agreement=float(agreed.mean()),
        noise_kld=noise_kld,
        tokens=len(kld),
        text=text,
    )


def passage_ids(
    tokenizer: Tokenizer,
    *,
    context_len: int,
    policies: ListLike[CachePolicy],
    text: str | None = None,
    tokens: int | None = None,
) -> tuple[list[int], str]:
    """The ids to measure on, and what they are in words.

    `text`: None takes the one that ships (two chapters of Alice's Adventures in Wonderland), after generated sentences
    where more tokens are wanted. `tokens`: None takes as many as it has, or as the policies need to show what they do,
    within the context. Raises BadParameter where there are too few tokens for a policy to come into force.
    """
    own = text is not None
    ids = tokenizer.encode(text if text is not None else shipped_text())
    wanted = tokens if tokens is not None else max(len(ids), 0 if own else 3 * max(map(acts_from, policies), default=0))
    wanted = min(wanted, context_len)
    generated = ""
    if not own and len(ids) < wanted:
        ids, generated = _with_generated(tokenizer, wanted), " after generated sentences"
    if len(ids) < wanted:
        raise BadParameter("tokens", f"the text has {len(ids):,}", "Give a longer text, or ask for fewer.")
    ids = ids[:wanted]
    _require_effect(len(ids), policies)
    what = "the given text" if own else f"Alice's Adventures in Wonderland, chapters I and VII{generated}"
    return ids, f"{what}, the last {len(ids) - len(ids) // 2:,} of {len(ids):,} tokens"


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """The same weights, which kernels then multiply with activations in float32 and not rounded to 8 bits."""
    return replace(loaded, weights={name: _in_float32(tensor) for name, tensor in loaded.weights.items()})


def _in_float32(tensor: StoredTensor) -> StoredTensor:
    floats = tensor.to_float32().reshape(fold(tensor.shape))
    return StoredTensor(tensor.name, "F32", tensor.shape, floats.view(np.uint8))


def acts_from(policy: CachePolicy) -> int:
    """Tokens within which a part of the policy is not in force; number formats without precise pages are at once."""
    sparse = SPARSE_SINKS + SPARSE_WINDOW if policy.sparse_prefill else 0
    window = policy.window + policy.sinks if policy.window is not None else 0
    return max(sparse, window, policy.budget or 0, _first_conversion(policy))


def _first_conversion(policy: CachePolicy) -> int:
    """Where the first page becomes a 4-bit one, if pages are 8-bit at first."""
    precise = PRECISE_LEN if policy.precise is None else policy.precise
    if "q4" not in (policy.kv_format or "") or precise == 0:
        return 0
    first_and_newest = PAGE_LEN + -(-precise // PAGE_LEN) * PAGE_LEN
    return -(-(first_and_newest + 1) // STRIDE) * STRIDE


def shipped_text() -> str:
    return files("heedful.engine").joinpath("passage.txt").read_text(encoding="utf-8")


def _with_generated(tokenizer: Tokenizer, wanted: int) -> list[int]:
    """At least `wanted` ids: generated sentences, then the shipped text."""
    source, generated = sentences(seed=0), ""
    while len(ids := tokenizer.encode(f"{generated}\n\n{shipped_text()}")) < wanted:
        for _ in range((wanted - len(ids)) // 40 + 1):
            generated = f"{generated} {next(source)}".lstrip()
    return ids


def _require_effect(tokens: int, policies: ListLike[CachePolicy]) -> None:
    if tokens < FEWEST_TOKENS:
        raise BadParameter("tokens", f"{tokens} are too few", f"Take {FEWEST_TOKENS} or more.")
    for policy in policies:
        if tokens <= (needed := acts_from(policy)):
            raise BadParameter(
                "tokens",
                f"{policy_name(policy)} is not in force within {needed:,} tokens",
                "Take more, better three times as many.",
            )
