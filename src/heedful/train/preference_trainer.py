"""A base that learns preferences: what of a trainer is its own. The loss is preference_loss.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heedful.kernels.text_attention import PackedCausalAttend
from heedful.train.batches import IGNORED, Batch, Pair, Pairs, arrays, count_targets, pairs_of
from heedful.train.learner import BatchFacts, BestBy
from heedful.train.preference_loss import preference_loss, token_losses
from heedful.train.preference_store import has_reference, open_reference, write_reference
from heedful.train.run_files import DATA, RunFiles
from heedful.train.settings import told
from heedful.train.spread import ALONE
from heedful.train.team import Team
from heedful.train.token_store import TokenStore
from heedful.train.trainer import ChatTrainer


@dataclass(frozen=True)
class _Sums:
    """Over pairs."""

    loss: float
    right: float
    """In how many the chosen answer has the larger reward."""
    margin: float
    chosen_logp: float
    rejected_logp: float

    def figures(self, pairs: int) -> dict[str, float]:
        return {
            "preference_accuracy": self.right / pairs,
            "reward_margin": self.margin / pairs,
            "chosen_logp": self.chosen_logp / pairs,
            "rejected_logp": self.rejected_logp / pairs,
        }


@dataclass(frozen=True)
class _Preferences:
    store: TokenStore
    reference: npt.NDArray[np.float64]
    """(chats,): Σ log p of each answer under the base; NaN where it was not asked for."""

    def reference_of(self, pairs: Sequence[Pair]) -> Tensor:
        """(pairs, 2)."""
        numbers = [[pair.chosen.document, pair.rejected.document] for pair in pairs]
        return torch.from_numpy(self.reference[np.array(numbers, dtype=np.int64).reshape(-1, 2)])


class PreferenceTrainer(ChatTrainer):
    """Judged by the loss of a pair. A step passes both answers of its pairs, each after its own copy of the prompt."""

    best_by = BestBy("preference_loss", "nats a pair")

    def __init__(self, run: RunFiles, team: Team = ALONE) -> None:
        super().__init__(run, team)
        self._train = self._validation = _Preferences(run.data.store, np.empty(0))

    # ---- what the base thinks

    def prepare(self, say: Callable[[str], None], steps: int | None = None) -> None:
        data = self.run.data
        if steps is not None:
            self._train = _Preferences(data.store, self._base_log_probs(data.store, self._pairs_of_steps(steps)))
            return
        self._train = self._prepared("train", data.store, say)
        of_own = bool(self.settings.data.validation)
        self._validation = self._prepared("validation", data.validation_store, say) if of_own else self._train

    def _pairs_of_steps(self, steps: int) -> list[Pair]:
        """Of the first ones."""
        found, cursor = [], 0
        for _ in range(steps):
            batch = self.run.data.batch(cursor)
            found += pairs_of(batch.segments)
            cursor = batch.cursor
        return found

    def _prepared(self, name: str, store: TokenStore, say: Callable[[str], None]) -> _Preferences:
        folder = self.run.folder / DATA / name
        if self.team.of_first(int(has_reference(folder))):
            return _Preferences(store, open_reference(folder))
        say(f"{name}: log p of {store.facts.documents:,} answers under the base, once, kept in {folder}")
        values = self._base_log_probs(store, list(Pairs(store)))
        if self.team.is_first:
            write_reference(folder, values)
        return _Preferences(store, values)

    def _base_log_probs(self, store: TokenStore, pairs: Sequence[Pair]) -> npt.NDArray[np.float64]:
        """As the model is now: nothing is trained yet. (chats,), NaN where no pair has it."""
        numbers = [segment.document for pair in pairs for segment in pair.segments]
        found = np.zeros(store.facts.documents)
        with self._as_shown():
            for part in self._judged_parts(pairs):
                of_part = [segment.document for pair in part for segment in pair.segments]
                found[of_part] = self._log_probs(store, part).flatten().numpy()
        summed = np.full(store.facts.documents, np.nan)
        summed[numbers] = self.team.sum_over_data(*found[numbers].tolist())
        return summed

    # ---- steps

    def pass_batch(self) -> BatchFacts:
        batch = self._next_batch()
        pairs = pairs_of(batch.segments)
        sums = self.preference_gradients(pairs)
        return replace(self._facts(batch, sums.loss, len(pairs)), figures=sums.figures(len(pairs)))

    def preference_gradients(self, pairs: Sequence[Pair]) -> _Sums:
        """Leaves the gradients of the returned `loss`, in however many parts it is cut."""
        settings, total = self.settings, _Sums(0.0, 0.0, 0.0, 0.0, 0.0)
        scored = count_targets(self._train.store, [pair.chosen for pair in pairs])
        for part in self._own_parts(pairs, settings.optim.micro_batches):
            log_probs = self._log_probs(self._train.store, part)
            found = preference_loss(log_probs, self._train.reference_of(part), settings.dpo)
            loss = found.losses.sum() / len(pairs) - settings.dpo.sft_weight * log_probs[:, 0].sum() / scored
            loss.backward()  # type: ignore[no-untyped-call]
            total = _added(total, loss, found.margins, log_probs)
        return _Sums(*self.team.sum_over_data(*astuple(total)))

    def _log_probs(self, store: TokenStore, pairs: Sequence[Pair]) -> Tensor:
        """float64 (pairs, 2): Σ log p over what is scored of chosen and rejected."""
        segments = [segment for pair in pairs for segment in pair.segments]
        order = sorted(range(len(segments)), key=lambda place: segments[place].length)  # equal ones run together
        part = arrays(store, [segments[place] for place in order])
        counted = torch.from_numpy(part.targets != IGNORED)
        owners = torch.from_numpy(np.repeat(order or [0], part.lengths))[counted]
        ids, positions, targets = (torch.from_numpy(ints) for ints in (part.token_ids, part.positions, part.targets))
        hidden = self.decoder(ids, positions, PackedCausalAttend(part.lengths))
        chunk = self.settings.optim.loss_chunk
        nats = token_losses(self.decoder, hidden[counted], targets[counted], chunk=chunk)
        return -torch.zeros(len(segments), dtype=torch.float64).index_add(0, owners, nats.double()).view(-1, 2)

    def _described(self, batch: Batch) -> str:
        rows = sorted({pair.chosen.document // 2 for pair in pairs_of(batch.segments)})
        shown = ", ".join(map(str, rows[:12])) + (", …" if len(rows) > 12 else "")
        return f"preferences {self.state.cursor:,} to {batch.cursor - 1:,} of the order, which are {shown} of the data"

    # ---- judging

    def judge(self) -> dict[str, float]:
        pairs, tokens = [], 0
        for pair in pairs_of(self.run.data.validation_segments):
            if tokens >= self.settings.run.eval_tokens:
                break
            pairs.append(pair)
            tokens += pair.length
        if not pairs:
            return {}
        total = _Sums(0.0, 0.0, 0.0, 0.0, 0.0)
        with self._as_shown():
            for part in self._judged_parts(pairs):
                log_probs = self._log_probs(self._validation.store, part)
                found = preference_loss(log_probs, self._validation.reference_of(part), self.settings.dpo)
                total = _added(total, found.losses.sum(), found.margins, log_probs)
        sums = _Sums(*self.team.sum_over_data(*astuple(total)))
        return {"preference_loss": sums.loss / len(pairs), **sums.figures(len(pairs)), **self._choice_figures()}

    def _judged_parts(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        parts = -(-sum(pair.length for pair in pairs) // told(self.settings.optim.batch_tokens))
        return self._own_parts(pairs, parts * self.settings.optim.micro_batches)


def _added(sums: _Sums, loss: Tensor, margins: Tensor, log_probs: Tensor) -> _Sums:
    """`loss` is a sum already."""
    chosen, rejected = log_probs.detach().sum(0).tolist()
    return _Sums(
        sums.loss + float(loss.detach()),
        sums.right + float((margins > 0).sum()),
        sums.margin + float(margins.detach().sum()),
        sums.chosen_logp + chosen,
        sums.rejected_logp + rejected,
    )
