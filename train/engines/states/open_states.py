"""Opens the hidden states of servers for a training, on all ranks together."""

import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode.base.artifact import require_space, temporary
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.model.loading import Target
from distill.teacher.feature_sources import LiveFeatures
from train.data.batches import collate, inputs
from train.data.chat_tokens import Sample
from train.data.read import spread
from train.data.stored_samples import StoredSamples
from train.engines.ask_servers import Unanswered
from train.engines.launch import engine_in_words, launched
from train.engines.states.ask_states import StatesClient, StatesReader, StatesServers, delete
from train.engines.states.served_states import EngineLayers, ServedStates, require_disk_room
from train.measure.ranks import Ranks
from train.settings.server_config import StatesServer

MODULES = Path(__file__).parent
# ‖theirs − ours‖ ÷ ‖ours‖, the median over tokens: room for 16 bits and other kernels.
MOST_OFF = 0.1


@contextmanager
def served_states(
    config: StatesServer,
    target: Target,
    samples: StoredSamples,
    layers: Sequence[int],
    accelerator: Accelerator,
    directory: Path,
    timed: Callable[[], AbstractContextManager[None]],
    say: Callable[[str], None],
) -> Iterator[ServedStates]:
    """States of `samples` at captured layers, asked for by every rank for its own samples.

    directory: the directory of the stage. All ranks enter and leave together. Raises UserError if a
    sample is too long for the target or for `max_gib`, if the disk is full, if a server does not
    start or answer, and if it runs another model.
    """
    ranks = Ranks.of(accelerator)
    engine_layers = EngineLayers(target, layers)
    reader = StatesReader(engine_layers)
    longest = int(samples.lengths.max())
    share = config.max_bytes // ranks.world
    if longest >= target.max_positions:
        raise UserError(
            f"a sample has {longest} tokens, and a server needs room for one more, but the target "
            f"has {target.max_positions} positions; set max_length to {target.max_positions - 1} "
            "or less"
        )
    require_disk_room(reader.size(longest), longest, config.max_bytes, ranks.world)
    with ExitStack() as stack:
        files = ranks.together(lambda: _files(config, directory, ranks, stack))
        total = sum(reader.size(length) for length in samples.lengths.tolist())
        what = "hidden states on their way (features.server.max_gib)"
        ranks.together(lambda: require_space(files, min(total, config.max_bytes), what))
        if config.launch and ranks.is_main:
            say(engine_in_words(config))
        urls = stack.enter_context(
            launched(
                config,
                target,
                longest + 1,
                directory,
                ranks,
                options=vllm_options(engine_layers.ids, files),
                modules=MODULES,
            )
        )
        # The same at the next start, which deletes what a kill leaves.
        place = f"{socket.gethostname()} {os.path.abspath(directory)}"
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        requester = f"draftsmith-{digest}-{ranks.rank}"
        stack.callback(_clean, files, requester)
        _clean(files, requester)
        clients = [
            StatesClient(url, config, reader, files, f"{requester}-{number}")
            for number, url in enumerate(urls)
        ]
        concurrency = max(1, config.concurrency // ranks.world)
        servers = StatesServers(clients, reader, concurrency, share)
        ranks.together(lambda: stack.enter_context(servers))
        source = ServedStates(
            servers.ask, target, engine_layers, timed=timed, say=say, lost=servers.lost
        )
        if config.probe_samples:
            chosen = spread(samples, config.probe_samples)
            ranks.together(lambda: _check(servers, chosen, target, engine_layers, ranks))
        yield source


def vllm_options(ids: Sequence[int], files: Path) -> dict[str, Any]:
    """The options of a vLLM that can import from MODULES and writes states to the directory
    `files`. ids: its ids of their layers."""
    return {
        # Parts of a text that are read from a cache have no states.
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(files)},
        },
    }


def _files(config: StatesServer, directory: Path, ranks: Ranks, stack: ExitStack) -> Path:
    """The directory of the files."""
    above = None if config.directory is None else from_home(config.directory)
    if config.launch is None:
        assert above is not None, "the config is checked"
        if not above.is_dir():
            raise UserError(
                f"features.server.directory is {above}, which is no directory here; expected the "
                "server's shared_storage_path"
            )
        return above
    return stack.enter_context(shared_files(above or directory, ranks))


@contextmanager
def shared_files(directory: Path, ranks: Ranks) -> Iterator[Path]:
    """A directory for the files of an engine that the first rank starts, deleted at the end."""
    with temporary(directory / "states") as files:

        def made() -> Path:
            files.mkdir(parents=True)
            return files.resolve()

        yield ranks.main_only(made)


def _clean(files: Path, requester: str) -> None:
    for path in files.glob(f"*{requester}-*.safetensors"):
        delete(path)
    for path in files.glob(f"*{requester}-*.lock"):
        path.unlink(missing_ok=True)


def _check(
    servers: StatesServers,
    samples: Sequence[Sample],
    target: Target,
    layers: EngineLayers,
    ranks: Ranks,
) -> None:
    """Raise UserError unless each server's states are the target's. The first rank asks. A sample
    that a server does not answer is passed over, if it answers another one."""
    if not ranks.is_main:
        return
    unanswered: dict[str, list[Unanswered]] = defaultdict(list)
    for sample in samples:
        batch = collate([sample], 0)
        tensors = inputs(batch, target.device)
        ours = LiveFeatures(target.model, layers.captured).features(
            tensors["input_ids"], tensors["attention_mask"], batch["ids"]
        )
        for url, states in servers.ask_each(sample):
            if isinstance(states, Unanswered):
                unanswered[url].append(states)
                continue
            theirs = layers.joined([states], target.device)
            for layer in layers.captured:
                expected = ours[layer].float()
                off = (theirs[layer].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
                if not float(off.median()) <= MOST_OFF:
                    raise UserError(
                        f"{url} does not give the hidden states of {target.name}: those of layer "
                        f"{layer} differ by {float(off.median()):.2f} of their length. Start it "
                        "with this model, and with eagle_aux_hidden_state_layer_ids "
                        f"{layers.ids}"
                    )
    for problems in unanswered.values():
        if len(problems) == len(samples):
            raise problems[0]
