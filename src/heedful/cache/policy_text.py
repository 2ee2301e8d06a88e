"""A cache policy as one line of text, and back: `kv=q8,window=1024,sinks=4`.

    parse_policy("kv=k:q8/v:q4,budget=1024")

The parts, in any order: kv=FORMAT or kv=k:FORMAT/v:FORMAT (a bare FORMAT too), precise=N, window=N, sinks=N, budget=N,
prefill=sparse. `policy_name` writes them in one way only, so its text serves as a key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from heedful.cache.policy import PAGE_LEN, PRECISE_LEN
from heedful.errors import BadParameter
from heedful.request import DEFAULT_KV_FORMAT, KV_ROW_BYTES, CachePolicy, KVFormat

_COUNTS = ("precise", "window", "sinks", "budget")
_FORM = "The form is kv=q8,window=1024,sinks=4: any of kv, precise, window, sinks, budget and prefill, commas between."


def parse_policy(text: str) -> CachePolicy:
    """Raises BadParameter, which names the part that is wrong."""
    parts = [part.strip() for part in text.split(",")]
    fields: dict[str, Any] = {}
    for part in parts:
        name, value = _field(part)
        if name in fields:
            raise BadParameter("policy", f"{part!r:.60} comes after another {name.split('_')[0]}", _FORM)
        fields[name] = value
    return CachePolicy(**fields)


def policy_name(policy: CachePolicy) -> str:
    """The same text for all that comes to the same: counts in whole pages where pages count, defaults left out.

    The number format is always in it; where the policy names none it is the native runner's own.
    """
    form = KVFormat.parse(policy.kv_format or DEFAULT_KV_FORMAT)
    kv = form.keys if form.keys == form.values else f"k:{form.keys}/v:{form.values}"
    precise = PRECISE_LEN if policy.precise is None else _whole_pages(policy.precise)
    words = [f"kv={kv}"]
    if "q4" in (form.keys, form.values) and precise != PRECISE_LEN:
        words.append(f"precise={precise}")
    if policy.window is not None:
        words.append(f"window={policy.window}")
    if policy.sinks:
        words.append(f"sinks={policy.sinks}")
    if policy.budget is not None:
        words.append(f"budget={_whole_pages(policy.budget)}")
    if policy.sparse_prefill:
        words.append("prefill=sparse")
    return ",".join(words)


def with_format(policy: CachePolicy, default: KVFormat) -> CachePolicy:
    """The policy with its number format named: `default` where it names none."""
    return policy if policy.kv_format is not None else replace(policy, kv_format=default.name)


def is_exact(policy: CachePolicy) -> bool:
    """Whether it changes no output: every key and value in float32, and all of them read."""
    return policy_name(policy) == "kv=f32"


def _field(part: str) -> tuple[str, Any]:
    name, has_value, value = part.partition("=")
    if not has_value and name in KV_ROW_BYTES:
        return "kv_format", name
    if name == "kv" and value:
        return "kv_format", _kv_format(part, value)
    if name == "prefill" and value in ("sparse", "dense"):
        return "sparse_prefill", value == "sparse"
    if name in _COUNTS and value.isascii() and value.isdigit() and len(value) < 10:
        return name, int(value)
    wanted = {"prefill": "sparse or dense", **dict.fromkeys(_COUNTS, "a whole number")}.get(name)
    wrong = f"{part!r:.60} is not a part of a policy" if wanted is None else f"{part!r:.60}: {name} takes {wanted}"
    raise BadParameter("policy", wrong, _FORM)


def _kv_format(part: str, value: str) -> str:
    try:
        return KVFormat.parse(value.replace(":", "=").replace("/", ",")).name
    except (BadParameter, ValueError):
        formats = ", ".join(KV_ROW_BYTES)
        raise BadParameter(
            "policy", f"{part!r:.60}: kv takes one of {formats}", "Keys and values apart: kv=k:q8/v:q4."
        ) from None


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_LEN) * PAGE_LEN
