#!/usr/bin/env python3
"""Time llama.cpp on one GGUF model: prefill and decode tokens/s at several context fills.

    python -m venv peer-venv && peer-venv/bin/pip install llama-cpp-python==0.3.36   # compiles, ~10 min on 2 cores
    peer-venv/bin/python peer_llama_cpp.py MODEL.gguf --fill 64 512 2048 7000 --kv f16 q8_0 q4_0

One JSON line per case. Run it in the same session as our own bench, in turn, so that both see the same machine.
Decode = mean over --decode tokens after the context holds FILL tokens. Flash attention on and off are separate
cases, because on CPU either can be the faster one: the peer's figure is the better of the two.
"""

import argparse
import json
import statistics
import time

KV = {"f16": 1, "q8_0": 8, "q4_0": 2}


def case(path, fill, kv, flash, threads, decode, repeats):
    from llama_cpp import Llama

    llm = Llama(
        path,
        n_ctx=fill + decode * repeats + 64,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        flash_attn=flash,
        type_k=KV[kv],
        type_v=KV[kv],
        n_batch=512,
    )
    tokens = [(i * 7919) % 40000 + 10 for i in range(fill)]
    start = time.perf_counter()
    llm.eval(tokens)
    prefill = fill / (time.perf_counter() - start)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        for i in range(decode):
            llm.eval([tokens[i % fill]])
        rates.append(decode / (time.perf_counter() - start))
    llm.close()
    return {
        "peer": "llama.cpp",
        "fill": fill,
        "kv": kv,
        "flash": flash,
        "prefill_tok_s": round(prefill, 1),
        "decode_tok_s": round(statistics.median(rates), 2),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fill", type=int, nargs="+", default=[64, 512, 2048, 7000])
    p.add_argument("--kv", nargs="+", default=["f16"], choices=sorted(KV))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--decode", type=int, default=16)
    p.add_argument("--repeats", type=int, default=3)
    a = p.parse_args()
    for kv in a.kv:
        for fill in a.fill:
            for flash in [True, False] if kv == "f16" else [True]:
                print(json.dumps(case(a.model, fill, kv, flash, a.threads, a.decode, a.repeats)), flush=True)


if __name__ == "__main__":
    main()
