"""Where the hidden states for a training of heads come from."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from decode.base.errors import UserError
from decode.model.loading import Target
from distill.teacher.cached_features import bytes_per_token
from distill.teacher.read_ahead import READ_AHEAD
from heads.head_training import captured_with
from heads.heads_module import Heads
from train.base.stage import StageMemory, StagePlan
from train.data.stored_samples import StoredSamples
from train.engines.launch import require_server
from train.engines.states.served_states import engine_ids, file_bytes, last_norm, require_disk_room
from train.loop.estimates import tokens_per_rank
from train.loop.heads_target import StateSource
from train.loop.open_caches import open_features
from train.loop.trainer import TrainingClock
from train.settings.heads_config import HeadsConfig
from train.settings.server_config import ServedFeatures
from train.stages.text_stages import TrainingStage


def planned_source(
    config: HeadsConfig,
    target: Target,
    heads: Heads,
    processes: int,
    plans: Mapping[str, StagePlan],
) -> tuple[StageMemory, int, str]:
    """What a server of states adds to a plan: the memory of one of `processes`, the bytes on disk,
    and words. Nothing without a server. plans: those of the earlier stages. Raises UserError for a
    server that cannot be used, and for a stage that stores other layers than are read."""
    layers = captured_with(heads, config.weighted_loss)
    if not isinstance(config.features, ServedFeatures):
        stored = plans[config.features].captured_layers if config.features in plans else layers
        if not set(layers) <= set(stored):
            raise UserError(
                f"stage {config.name}: its {config.heads.type} heads and losses read the hidden "
                f"states of the layers {list(layers)}, and stage {config.features} stores those of "
                f"{list(stored)}; set stages.{config.features}.captured_layers={list(layers)}"
            )
        return StageMemory(), 0, ""
    server = config.features.server
    require_server(server, target)
    last_norm(target)
    # A server needs room for one more token.
    longest = min(config.max_length, target.max_positions - 1)
    largest = file_bytes(bytes_per_token(target, engine_ids(target, layers)), longest)
    require_disk_room(largest, longest, server.max_bytes, processes)
    batch = tokens_per_rank(config.loop.tokens_per_batch, config.max_length, processes)
    held = bytes_per_token(target, layers) * batch * (1 + READ_AHEAD)
    what = f"eagle_aux_hidden_state_layer_ids {engine_ids(target, layers)} of a server; "
    return StageMemory(states=held), server.max_bytes if server.launch else 0, what


def open_source(
    stage: TrainingStage,
    config: HeadsConfig,
    samples: StoredSamples,
    captured_layers: Sequence[int],
    clock: TrainingClock,
    stack: ExitStack,
) -> StateSource:
    """The source of a frozen target's hidden states, for a `stage` with this `config`. stack: ends
    what it starts. Every rank must call this. Raises UserError as the sources do."""
    target, accelerator = stage.target, stage.accelerator
    if isinstance(config.features, ServedFeatures):
        from train.engines.states.open_states import served_states  # needs the extra serve

        served = served_states(
            config.features.server,
            target,
            samples,
            captured_layers,
            accelerator,
            stage.directory,
            timed=partial(clock, "teacher"),
            say=lambda problem: stage.reporter.say(f"  {problem}"),
        )
        return stack.enter_context(served)
    if config.features != "live":
        directory = stage.cache_directory(config.features)
        return open_features(directory, target, samples, captured_layers, accelerator)
    sources = {s.id: s.source for s in samples} if target.has_encoder else None
    return stage.live_states(captured_layers, config.loop, clock, sources)
