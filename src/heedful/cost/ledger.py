"""The ledger: the exact sum of receipts, what a session or a server has spent."""

from __future__ import annotations

from dataclasses import dataclass

from heedful.cost.receipt import Receipt


@dataclass
class Ledger:
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    visits: int = 0
    dense_visits: int = 0
    kv_bytes_read: int = 0
    weight_bytes_read: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    joules_low: float = 0.0
    joules_high: float = 0.0

    def add(self, receipt: Receipt) -> None:
        self.requests += 1
        self.prompt_tokens += receipt.prompt_tokens
        self.output_tokens += receipt.output_tokens
        self.visits += receipt.visits.total
        self.dense_visits += receipt.visits.dense
        self.kv_bytes_read += receipt.kv.bytes_read
        self.weight_bytes_read += receipt.weights.bytes_read
        self.seconds += receipt.seconds.total
        self.joules += receipt.energy.joules
        self.joules_low += receipt.energy.low
        self.joules_high += receipt.energy.high
