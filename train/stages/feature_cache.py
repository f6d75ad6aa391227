"""`feature_cache`: the target's hidden states of a text, for any number of trainings of heads."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from decode.errors import UserError
from decode.target.hidden_states import FINAL, Recorder
from distill.teacher.hidden_state_cache import (
    CachedFeatures,
    bytes_per_token,
    split_rows,
    write_features,
)
from distill.teacher.live_hidden_states import LiveFeatures
from train.data.chat import Sample
from train.data.corpus import read_samples
from train.schema import StageConfig
from train.stage import STAGES, Outcome, Stage, StageContext, StagePlan
from train.text_stages import (
    TextConfig,
    batches_of,
    check_text,
    fitting_samples,
    planned_tokens,
    size,
    write_parts,
)


class FeatureCacheConfig(TextConfig):
    """captured_layers: the layers whose hidden states are captured, by number; −1 for the hidden
    states that the output layer reads. part_samples: the number of samples per written part; a
    killed stage loses at most one part."""

    kind: Literal["feature_cache"] = "feature_cache"
    captured_layers: list[int] = Field([FINAL], min_length=1)
    tokens_per_batch: int = Field(2048, ge=1)
    part_samples: int = Field(256, ge=1)


@STAGES.register("feature_cache")
class FeatureCacheStage(Stage):
    """Writes part-0, part-1, … (`distill.teacher.hidden_state_cache`)."""

    Config = FeatureCacheConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: FeatureCacheConfig = self.config
        check_text(settings, earlier)
        if len(set(settings.captured_layers)) < len(settings.captured_layers):
            raise UserError(
                f"stage {settings.name}: captured_layers {settings.captured_layers} name a layer "
                "twice; name it once"
            )

    def plan(self, context: StageContext) -> StagePlan:
        settings: FeatureCacheConfig = self.config
        Recorder(context.target.model, settings.captured_layers)  # refuses layers that do not exist
        each = bytes_per_token(context.target, settings.captured_layers)
        tokens = planned_tokens(context, settings)
        what = f"{len(settings.captured_layers)} hidden states: {each} bytes a token, prompts too"
        if settings.text == "data":
            samples = read_samples(context, "data")
            total = sum(min(len(s.tokens), settings.max_length) for s in samples)
            what += f"; {size(each * total)} on disk"
        return StagePlan(
            what,
            tokens=tokens,
            memory_bytes=sum(
                p.numel() * p.element_size() for p in context.target.model.parameters()
            ),
        )

    def run(self, context: StageContext) -> Outcome:
        settings: FeatureCacheConfig = self.config
        target = context.target
        source = LiveFeatures(target.model, settings.captured_layers)
        samples, counts = fitting_samples(context, settings)
        each = bytes_per_token(target, settings.captured_layers)
        tokens = sum(len(sample.tokens) for sample in samples)
        context.reporter.say(f"  {each} bytes a token, {tokens} tokens: {size(each * tokens)}")

        def write(number: int, part: Sequence[Sample], names: list[tuple[str, str]]) -> int:
            found: dict[int, dict] = {}
            for rows, batch, given in batches_of(context, part, settings.tokens_per_batch):
                ids, mask = given["input_ids"], given["attention_mask"]
                features = source.features(ids, mask, batch["ids"])
                lengths = [len(part[i].tokens) for i in rows]
                found |= dict(zip(rows, split_rows(features, lengths), strict=True))
            by_tap = {
                layer: [found[i][layer] for i in range(len(part))]
                for layer in settings.captured_layers
            }
            write_features(context.directory, number, names, by_tap, target)
            return sum(len(sample.tokens) for sample in part)

        speed = write_parts(context, samples, settings.part_samples, write)
        # Checks that the cache is complete and belongs to this target.
        CachedFeatures(context.directory, target, settings.captured_layers)
        return Outcome(
            summary={
                "samples": counts,
                "tokens": tokens,
                "captured_layers": settings.captured_layers,
                "bytes_per_token": each,
                "tokens_per_second": speed,
            }
        )
