#!/usr/bin/env python3
"""Time ik_llama.cpp, the fastest CPU engine we know, on one GGUF model: prefill and decode tokens/s at several fills.

    python -m venv ik-venv && ik-venv/bin/pip install ik-llama-cpp-python==0.1.5     # a wheel, no compiling
    ik-venv/bin/python peer_ik_llama.py MODEL.gguf --fill 64 512 2048 7000

One JSON line per case; each case runs in a process of its own, because its flash attention can abort on some CPUs.
Flash attention on and off are both timed: the peer's figure is the better of the two. Same tokens, same counting as
peer_llama_cpp.py; run both, and our own bench, in turn in one session.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def case(path, fill, flash, threads, decode, repeats):
    from ik_llama_cpp import _ctypes_api as C
    from ik_llama_cpp._internals import IkContext, IkModel
    from ik_llama_cpp.llama import make_batch_range, make_batch_single

    context = IkContext(IkModel(path), n_ctx=fill + decode * repeats + 64, n_threads=threads, flash_attn=flash)

    def run(batch):
        if context.decode(batch):
            raise SystemExit("llama_decode failed")
        C.llama_batch_free(batch)

    tokens = [(i * 7919) % 40000 + 10 for i in range(fill)]
    step = context._n_ubatch
    start = time.perf_counter()
    for i in range(0, fill, step):
        run(make_batch_range(tokens[i : i + step], pos_start=i, logits_last=i + step >= fill))
    prefill = fill / (time.perf_counter() - start)
    rates, pos = [], fill
    for _ in range(repeats):
        start = time.perf_counter()
        for i in range(decode):
            run(make_batch_single(tokens[i % fill], pos))
            context.get_logits(-1)
            pos += 1
        rates.append(decode / (time.perf_counter() - start))
    return {
        "peer": "ik_llama.cpp",
        "fill": fill,
        "kv": "f16",
        "flash": flash,
        "prefill_tok_s": round(prefill, 1),
        "decode_tok_s": round(statistics.median(rates), 2),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fill", type=int, nargs="+", default=[64, 512, 2048, 7000])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--decode", type=int, default=16)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--flash", choices=["on", "off"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.flash:
        print(json.dumps(case(a.model, a.fill[0], a.flash == "on", a.threads, a.decode, a.repeats)), flush=True)
        return
    for fill in a.fill:
        for flash in ("on", "off"):
            done = subprocess.run(
                [
                    sys.executable,
                    __file__,
                    a.model,
                    "--fill",
                    str(fill),
                    "--flash",
                    flash,
                    "--threads",
                    str(a.threads),
                    "--decode",
                    str(a.decode),
                    "--repeats",
                    str(a.repeats),
                ],
                capture_output=True,
                text=True,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            print(
                lines[-1]
                if lines
                else json.dumps(
                    {"peer": "ik_llama.cpp", "fill": fill, "flash": flash == "on", "error": f"exit {done.returncode}"}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
