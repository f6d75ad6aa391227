"""`datastore`: a text as tokens with a suffix array, from which the drafter `rest` drafts."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decode.base.artifact import size
from decode.drafters.lookup.documents import memory_to_sort, require_memory_to_sort
from decode.drafters.lookup.rest import RestOptions, write_rest
from decode.opening.directory import describe_drafter, save_drafter
from train.base.stage import STAGES, StageMemory, StagePlan, StageResult
from train.data.stored_samples import StoredSamples
from train.measure.ranks import Ranks
from train.settings.datastore_config import DatastoreConfig
from train.stages.text_stages import TextStage

# Bytes of a finished datastore per token: at most four for the token and its position each, up to
# two billion tokens.
STORED_BYTES = 8


def _options(config: DatastoreConfig) -> RestOptions:
    return RestOptions(config.min_n, config.max_n, config.max_hits, config.tree_nodes)


@dataclass(frozen=True)
class _Documents:
    """The tokens of the samples, int32 [n] each, read from their files each time."""

    samples: StoredSamples

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array(sample.tokens, np.int32) for sample in self.samples)


@STAGES.register("datastore")
class DatastoreStage(TextStage[DatastoreConfig]):
    """Writes `drafter`, a directory of the drafter `rest`, complete or not at all."""

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        stored = self.planned_text_tokens(plans)
        require_memory_to_sort(stored)
        return StagePlan(
            f"a datastore of {stored:,} tokens, prompts included: {STORED_BYTES} bytes a token on "
            "disk",
            tokens=stored,
            memory=StageMemory(target=self.target_bytes, states=memory_to_sort(stored)),
            disk_bytes=STORED_BYTES * stored,
            drafters=1,
            runs_target=False,
        )

    def run(self) -> StageResult:
        begin, directory = time.perf_counter(), self.directory / "drafter"
        is_new = not Ranks.of(self.accelerator).main_only(directory.exists)
        if is_new:
            samples, counts = self.fitting_samples()  # all ranks together
            if self.accelerator.is_main_process:
                self._write(directory, samples, counts)
        self.accelerator.wait_for_everyone()
        summary = describe_drafter(directory)["provenance"]["datastore"]
        stored = sum(file.stat().st_size for file in directory.glob("*.npy"))
        self.reporter.say(
            f"  {summary['documents']} documents, {summary['tokens']:,} tokens, {size(stored)}"
        )
        seconds = time.perf_counter() - begin
        speed = summary["tokens"] / seconds if is_new else None
        return StageResult(
            directory, summary | {"datastore_bytes": stored, "tokens_per_second": speed}
        )

    def _write(self, directory: Path, samples: StoredSamples, counts: dict[str, int]) -> None:
        config = self.config
        tokens = int(samples.lengths.sum(dtype=np.int64))
        figures = {"samples": counts, "documents": len(samples), "tokens": tokens}
        provenance = self.origin | {"datastore": figures}

        def write(path: Path) -> None:
            write_rest(path, _Documents(samples), _options(config))

        save_drafter(directory, "rest", write, target=self.target, provenance=provenance)
