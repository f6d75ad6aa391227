"""`feature_cache`: the target's hidden states of a text, for any number of trainings of heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.artifact import verify_directory
from decode.model.hidden_states import Recorder
from decode.model.pretrained import require_present
from distill.teacher.cache_directory import parts_of
from distill.teacher.cache_parts import check_parts
from distill.teacher.cached_features import (
    CachedFeatures,
    bytes_per_token,
    describe_source,
    write_features,
)
from distill.teacher.feature_sources import LiveFeatures, split_rows
from distill.teacher.linear_logits import require_linear_logits
from train.base.stage import STAGES, StageMemory, StagePlan, StageResult
from train.data.batches import batches_for
from train.data.chat_tokens import Sample
from train.loop.estimates import forward_bytes
from train.measure.ranks import Ranks
from train.settings.cache_configs import FeatureCacheConfig
from train.stages.text_stages import CacheStage

STATES = "states"  # in a generate stage's directory: those that it kept


@STAGES.register("feature_cache")
class FeatureCacheStage(CacheStage[FeatureCacheConfig]):
    """Writes part-0, part-1, … (`distill.teacher.cached_features`)."""

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        layers = self.config.captured_layers
        Recorder(self.target.model, layers)  # refuses layers that do not exist
        if self.target.has_weights:
            require_present(self.target.model, "a cache of hidden states")
        require_linear_logits(self.target.model)  # as all do that learn from the states
        token_bytes = bytes_per_token(self.target, layers)
        what = f"{len(layers)} hidden states: {token_bytes} bytes a token, prompts included"
        tokens = self.planned_text_tokens(plans)
        kept = [n for n in self.config.text_stages if {*layers} <= {*plans[n].captured_layers}]
        if kept:
            what += f"; kept while answering: {', '.join(kept)}"
            tokens -= sum(plans[name].text_tokens for name in kept)
        return StagePlan(
            what,
            tokens=tokens,
            memory=StageMemory(
                target=self.target_bytes,
                activations=forward_bytes(self.target.model, self.config.tokens_per_batch),
            ),
            disk_bytes=token_bytes * tokens,
            captured_layers=layers,
        )

    def run(self) -> StageResult:
        config, target = self.config, self.target
        source = LiveFeatures(target.model, config.captured_layers)
        samples, counts = self.fitting_samples()
        token_bytes = bytes_per_token(target, config.captured_layers)
        lengths = samples.lengths.astype(np.int64)
        made_with = describe_source(target)

        def write(number: int, part: Sequence[Sample], hashes: list[tuple[str, str]]) -> int:
            write_features(self.directory, number, hashes, self._states(source, part), made_with)
            return sum(len(sample.tokens) for sample in part)

        scored, speed, work = self.write_parts(
            samples, lengths, token_bytes, write, logits=0, kept=self._kept(made_with)
        )
        # Checks that the cache is complete and belongs to this target.
        CachedFeatures(self.directory, target, config.captured_layers)
        return StageResult(
            summary={
                "samples": counts,
                "tokens": int(lengths.sum()),
                "tokens_scored": scored,
                "captured_layers": config.captured_layers,
                "bytes_per_token": token_bytes,
                "tokens_per_second": speed,
            },
            work=work,
        )

    def _kept(self, made_with: Mapping[str, Any]) -> list[Path]:
        """The parts with states of these layers that this target kept while it answered."""
        ranks, layers = Ranks.of(self.accelerator), set(self.config.captured_layers)

        def fits(part: Path) -> bool:
            meta = verify_directory(part, deep=False)
            return meta["teacher"] == made_with and layers <= {*meta["captured_layers"]}

        def found() -> list[Path]:
            kept = list[Path]()
            for name in self.config.text_stages:
                parts = parts_of(self.earlier[name] / STATES)
                check_parts(ranks.own(parts))
                kept += filter(fits, parts)
            return kept

        return ranks.together(found)

    def _states(self, source: LiveFeatures, part: Sequence[Sample]) -> dict[int, list[Tensor]]:
        """The hidden states of a part's samples, in order, by captured layer."""
        states: dict[int, dict[int, Tensor]] = {}
        for rows, batch, tensors in batches_for(self.target, part, self.config.tokens_per_batch):
            features = source.features(
                tensors["input_ids"], tensors["attention_mask"], batch["ids"]
            )
            split = split_rows(features, [len(part[i].tokens) for i in rows], torch.device("cpu"))
            states |= zip(rows, split, strict=True)
        return {
            layer: [states[i][layer] for i in range(len(part))]
            for layer in self.config.captured_layers
        }
