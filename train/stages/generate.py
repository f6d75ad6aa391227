"""`generate`: the target answers prompts, because drafters learn best from the target's text. The
answer to a row with a `json_schema` is held to it.
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.base.artifact import remove_directory, verify_directory
from decode.base.errors import UserError
from decode.grammars import Grammar
from decode.loop.decoding import Decoder
from decode.loop.rows import RowSettings
from decode.model.generation_config import (
    decoder_processors,
    decoder_settings,
    nothing_filled_in,
    padded_prompts,
    stated_config,
)
from decode.model.loading import Target
from distill.teacher.cache_directory import parts_of
from distill.teacher.cache_parts import (
    check_parts,
    free_numbers,
    held,
    note_checked,
    text_sha256,
)
from distill.teacher.cached_features import bytes_per_token, describe_source, write_features
from distill.teacher.kept_states import KeptStates, OneMore
from train.base.stage import STAGES, Stage, StageMemory, StagePlan, StageResult, StageWork
from train.data.answer_files import AnswerFiles, answer_counts, draw_number, prompt_key
from train.data.corpus import SELF_PROMPTS
from train.data.read import Example, select, spread, values
from train.data.row_grammars import row_grammars
from train.data.self_prompts import (
    read_self_prompts,
    require_template,
    save_self_prompts,
    write_prompts,
)
from train.data.turns import Turns
from train.engines.answers.protocols import AskSettings
from train.engines.launch import require_server, require_states
from train.engines.states.served_states import EngineLayers
from train.loop.estimates import PROMPTS_MEASURED, decoding_memory, prompt_length
from train.loop.meters.stage_flops import pass_flops
from train.loop.meters.throughput import flops_of
from train.measure.ranks import Ranks
from train.settings.cache_configs import FeatureCacheConfig
from train.settings.generate_config import GenerateConfig
from train.stages.feature_cache import STATES

ID_BYTES = 7  # of a token id in JSON, for the plan


@STAGES.register("generate")
class GenerateStage(Stage[GenerateConfig]):
    """Writes the answers (`train.data.answer_files`). A kill loses at most `part_prompts` answers
    of each rank, and none of a server. Beside them are, in parts, the hidden states that later
    stages ask for (`distill.teacher.cached_features`)."""

    with_encoder = True

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config = self.config
        if config.self_prompts and self.target.has_encoder:
            raise UserError(
                f"stage {config.name}: self_prompts needs a decoder-only target, because an "
                "encoder reads prompts and writes none; leave it out"
            )
        if config.self_prompts:
            require_template(self.corpus.tokenizer, config.name)
            count, what = config.self_prompts * config.samples, " to the target's own prompts"
            prompt = config.max_prompt_tokens
        else:
            examples = self._examples()
            self._require_schemas(examples)
            count, what = len(examples) * config.samples, ""
            measured = spread(range(len(examples)), PROMPTS_MEASURED)
            prompt = prompt_length(self.corpus, select(examples, measured))
        if config.server:
            require_server(config.server, self.target)
            what += " by a server"
        reads_probes = config.server is not None and not config.self_prompts
        # With a server, the target writes prompts, or reads a few probes one after the other.
        memory = decoding_memory(
            self.target,
            self.target_bytes,
            rows=1 if reads_probes else config.batch_size * config.num_beams,
            prompt=prompt,
            new=0 if config.server else config.max_new_tokens,
        )
        plan = StagePlan(
            f"{count} answers{what} of at most {config.max_new_tokens} tokens",
            tokens=count * config.max_new_tokens,
            memory=memory,
            # Those that were appended are deleted when the part of all is whole.
            disk_bytes=2 * count * config.max_new_tokens * ID_BYTES,
            text_tokens=count * (prompt + config.max_new_tokens),
            captured_layers=self._kept_layers,
        )
        if self._kept_layers:
            readers = ", ".join(stage.name for stage in self._readers)
            token_bytes = bytes_per_token(self.target, self._kept_layers)
            together = min(config.part_prompts, count) * (prompt + config.max_new_tokens)
            if config.server:
                require_states(config.server, config.sampling, self.target)
                EngineLayers(self.target, self._kept_layers)  # refuses what it cannot tell apart
                # vLLM's files, until a part of states is written.
                files = min(config.part_prompts + config.server.concurrency, count)
                plan.disk_bytes += token_bytes * files * (prompt + config.max_new_tokens)
            plan.what += f"; keeps {len(self._kept_layers)} hidden states a token for {readers}"
            plan.memory += StageMemory(states=token_bytes * together)
            plan.disk_bytes += token_bytes * plan.text_tokens
        return plan

    @property
    def _readers(self) -> list[FeatureCacheConfig]:
        """The later stages that store states of these answers, if what makes them keeps some."""
        config, server = self.config, self.config.server
        if config.num_beams > 1 or (server and not server.keep_states):
            return []
        caches = [stage for stage in self.later if isinstance(stage, FeatureCacheConfig)]
        return [cache for cache in caches if config.name in cache.text_stages]

    @property
    def _kept_layers(self) -> list[int]:
        """The layers whose hidden states are kept."""
        return sorted({layer for cache in self._readers for layer in cache.captured_layers})

    def _require_schemas(self, examples: Sequence[Example]) -> None:
        """Raise UserError unless the answers can be held to the JSON Schemas of their rows."""
        config = self.config
        others = "a server" if config.server else "beam search" if config.num_beams > 1 else None
        if row_grammars(examples, self.target) and others:
            raise UserError(
                f"stage {config.name}: rows have a json_schema, and {others} does not hold answers "
                "to it; leave one of the two out"
            )

    def run(self) -> StageResult:
        begin, self._work = time.perf_counter(), StageWork(self.target.dtype)
        self._write_prompts()
        generated = self._generate(self._examples())
        seconds, counts = time.perf_counter() - begin, answer_counts(self.directory)
        if not counts["answers"]:
            raise UserError(
                f"stage {self.config.name} has no usable answer; see server.max_unusable"
            )
        shown = ("prompts", "answers", "tokens", "cut_at_limit")
        summary: dict[str, Any] = {name: counts[name] for name in shown}
        summary["tokens_per_second"] = generated / seconds if generated else None
        self.reporter.say(
            f"  {counts['answers']} answers, {counts['tokens']} tokens, {counts['cut_at_limit']} "
            f"cut at {self.config.max_new_tokens} tokens"
        )
        if self.config.server:
            why = ", ".join(f"{count} {reason}" for reason, count in counts["left_out"].items())
            summary |= {"left_out": why or "0", "retokenized": counts["retokenized"]}
            self.reporter.say(f"  left out: {why or 'none'}; {counts['retokenized']} retokenised")
        return StageResult(summary=summary, work=self._work)

    def _examples(self) -> Sequence[Example]:
        """Those whose prompts are answered."""
        config = self.config
        if config.self_prompts:
            written = read_self_prompts(self.directory / SELF_PROMPTS)
            return self.corpus.askable(written, f"prompts of {config.name}")
        answerable = self.corpus.answerable(config.split, config.name)
        if config.turns == "every":
            turns = Turns.of(answerable)
            answerable = self.corpus.askable(turns, f"turns of {config.split}")
        return select(answerable, spread(range(len(answerable)), config.prompts))

    def _write_prompts(self) -> None:
        """Let the target write prompts, unless they exist or are not wanted."""
        config, directory = self.config, self.directory / SELF_PROMPTS
        if not config.self_prompts:
            return
        ranks, drawn = Ranks.of(self.accelerator), self.directory / "drawn"
        if not ranks.main_only(lambda: _is_complete(directory)):
            held_out = [
                text
                for split in ("dev", "test")
                for example in self.corpus.examples.get(split, ())
                for text in example.user_texts()
            ]
            with self.reporter.bar("writing prompts", config.self_prompts, whole=False) as bar:
                written = write_prompts(
                    self.target,
                    self.corpus.system,
                    held_out,
                    config.self_prompts,
                    config.prompt_sampling.build(),
                    max_tokens=config.max_prompt_tokens,
                    batch_size=config.batch_size,
                    seed=config.seed,
                    directory=drawn,
                    ranks=ranks,
                    progress=bar.update,
                )
            if ranks.is_main:
                save_self_prompts(directory, config.name, written)
                remove_directory(drawn)
            left_out = "".join(f", {count} {reason}" for reason, count in written.dropped.items())
            self.reporter.say(f"  the target wrote {len(written.texts)} prompts{left_out}")
        self.accelerator.wait_for_everyone()

    def _generate(self, examples: Sequence[Example]) -> int:
        """Write every missing answer, with all ranks together. Returns the number of tokens that
        they generated."""
        config, ranks, states = self.config, Ranks.of(self.accelerator), self.directory / STATES
        wanted = self._wanted(examples, ranks)
        missing = ranks.main_only(wanted.missing)
        # Those of an earlier start; the writer hashes each of the others.
        ranks.together(lambda: check_parts(ranks.own(parts_of(states))))
        if missing is None:
            return 0
        total = len(wanted.keys)
        if known := total - len(missing):
            self.reporter.say(f"  {known} of {total} answers are there already")
        self._free = itertools.islice(free_numbers(parts_of(states)), ranks.rank, None, ranks.world)
        self._held = {pair for part in parts_of(states) for pair in held(part)}
        self.accelerator.wait_for_everyone()  # no rank takes a part of another for an earlier one
        generated, left_out = 0, Counter[str]()
        with self.reporter.bar("generating", total) as bar:
            done = itertools.count(known, ranks.world)
            self._one_more = lambda note="": bar.update(min(next(done), total), note)
            self._one_more()
            if config.server:
                generated, left_out = self._ask_server(wanted, ranks.own(missing))
            else:
                grammars, begin = row_grammars(examples, self.target), time.perf_counter()
                size = config.part_prompts
                for first in ranks.own(range(0, len(missing), size)):
                    numbers = missing[first : first + size]
                    generated += self._answer_some(wanted, numbers, grammars)
                self._work.seconds = time.perf_counter() - begin
            lost = sum(ranks.gather(left_out), Counter[str]())
            split = SELF_PROMPTS if config.self_prompts else config.split
            ranks.main_only(lambda: wanted.finish(split, lost, self.target.eos_token_ids))
            bar.update(total)
        if ranks.is_main and parts_of(states):
            note_checked(states, "states")
        return sum(ranks.gather(generated))

    def _wanted(self, examples: Sequence[Example], ranks: Ranks) -> AnswerFiles:
        """All answers to these examples. Every prompt is written now, so one that cannot be written
        is found before the first answer."""

        def prompt_keys() -> list[str]:
            mine = select(examples, range(ranks.rank, len(examples), ranks.world))
            prompts = self.corpus.each_prompt(mine)
            return list(map(prompt_key, prompts, values(mine, "schema")))

        by_rank = ranks.gather(ranks.together(prompt_keys))
        prompts = (by_rank[row % ranks.world][row // ranks.world] for row in range(len(examples)))
        names = {"sampling", "max_new_tokens", "num_beams", "seed"}
        made_by = self.config.model_dump(mode="json", include=names)
        samples = self.config.samples
        return AnswerFiles(self.directory, examples, samples, prompts, made_by, ranks.rank)

    def _ask_server(self, wanted: AnswerFiles, numbers: Sequence[int]) -> tuple[int, Counter[str]]:
        """Let a server make the answers with these numbers. Returns the number of tokens that were
        generated, and how many answers were left out for which reason."""
        from train.engines.answers.server_answers import ask_missing  # needs the extra serve

        config = self.config
        assert config.server is not None
        return ask_missing(
            wanted,
            numbers,
            self.corpus,
            self.target,
            config.server,
            AskSettings(
                config.sampling.build(),
                config.max_new_tokens,
                config.seed,
                self.target.eos_token_ids,
            ),
            together=min(config.part_prompts, len(wanted.keys)),
            ranks=Ranks.of(self.accelerator),
            layers=self._kept_layers,
            on_states=partial(self._write_states, wanted),
            on_answer=self._one_more,
            say=lambda problem: self.reporter.say(f"  {problem}"),
        )

    def _answer_some(
        self, wanted: AnswerFiles, numbers: Sequence[int], grammars: Mapping[str | None, Grammar]
    ) -> int:
        """Make the answers with these numbers, and keep them. Returns the number of tokens that
        were generated. grammars: by the schemas of rows."""
        examples = wanted.examples_of(numbers)
        schemas = values(examples, "schema")
        asked = zip(numbers, self.corpus.each_prompt(examples), schemas, strict=True)
        # Prompts of similar length come together: less padding. Equal ones are read once.
        rows = sorted(asked, key=lambda row: (len(row[1]), row[1]))
        numbers, prompts = [number for number, *_ in rows], [prompt for _, prompt, _ in rows]
        draws = [draw_number(wanted.keys[number]) for number in numbers]
        outputs, kept = self._answer(prompts, [grammars.get(x) for *_, x in rows], draws)
        answers = dict(zip(numbers, outputs, strict=True))
        texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        if kept:
            self._write_states(
                wanted, answers, {numbers[row]: (texts[row], x) for row, x in kept.items()}
            )
        wanted.add({number: {"tokens": output} for number, output in answers.items()})
        return sum(map(len, outputs))

    def _write_states(
        self,
        wanted: AnswerFiles,
        answers: Mapping[int, list[int]],
        kept: Mapping[int, tuple[list[int], dict[int, Tensor]]],
    ) -> None:
        """Write the states of answers, as a later stage looks for them: those of the samples that a
        training has of their answers. kept: what the target read of an answer's text, and its
        states."""
        names, stored = list[tuple[str, str]](), defaultdict[int, list[Tensor]](list)
        cache = max(self._readers, key=lambda cache: cache.max_length)
        longest = min(cache.max_length, self.target.max_positions)
        numbers = sorted(kept)
        examples = wanted.examples_of(numbers)
        rows = zip(numbers, values(examples, "id"), self.corpus.each_prompt(examples), strict=True)
        for number, name, prompt in rows:
            (read, states), place = kept[number], number % wanted.samples
            sample = self.corpus.answered(name, prompt, self.config.name, place, answers[number])
            if len(sample.tokens) > longest and cache.on_long == "drop":
                continue
            sample = sample.cut(longest)
            length, named = len(sample.tokens), (sample.id, text_sha256(sample.tokens, sample.mask))
            row_states = {layer: x[:length] for layer, x in states.items()}
            complete = all(len(x) == length for x in row_states.values())
            if not any(sample.mask) or not complete or sample.tokens != read[:length]:
                continue
            if named not in self._held:  # of a start that was killed before it kept the answers
                names.append(named)
                for layer, x in row_states.items():
                    stored[layer].append(x)
        if names:
            directory = self.directory / STATES
            write_features(directory, next(self._free), names, stored, self._made_with)

    @cached_property
    def _made_with(self) -> dict[str, Any]:
        return describe_source(self.target)

    def _answer(
        self,
        prompts: list[list[int]],
        grammars: list[Grammar | None],
        row_ids: list[int],
    ) -> tuple[list[list[int]], dict[int, dict[int, Tensor]]]:
        """The answers, and by place the hidden states of each that later stages ask for. They lack
        that of a text's last token if it ends a grammar's text or fills the target's context. Each
        answer's FLOPs include its whole prompt, also where equal prompts are read once."""
        config, target = self.config, self.target
        answers: list[list[int]] = []
        states: dict[int, dict[int, Tensor]] = {}
        if config.num_beams > 1:
            for begin in range(0, len(prompts), config.batch_size):
                answers += _beam_search(target, prompts[begin : begin + config.batch_size], config)
                for _ in range(begin, len(answers)):
                    self._one_more()
            return answers, states
        sampling, most = config.sampling.build(), config.max_new_tokens
        keeper = KeptStates(self._kept_layers)
        settings = [RowSettings(replace(sampling, grammar=x), config.seed) for x in grammars]
        if self._kept_layers:
            more = OneMore(target.eos_token_ids, most)
            settings = [
                # Only an EOS can follow a text that its grammar holds to be complete.
                replace(one, stop=more, ignore_eos=one.sampling.grammar is None)
                for one in settings
            ]
            most += 1

        def on_end(number: int, _: list[int]) -> None:
            self._one_more()
            if self._kept_layers:
                states[number] = keeper.take(number)

        decoder = Decoder(
            target.model,
            keeper,
            eos_token_ids=target.eos_token_ids,
            sampling=sampling,
            processors=decoder_processors(target.model, target.eos_token_ids),
        )
        decoded = decoder.decode(
            prompts,
            most,
            seed=config.seed,
            row_ids=row_ids,
            on_end=on_end,
            batch_size=config.batch_size,
            settings=settings,
        )
        lengths = [len(x) + len(y) for x, y in zip(prompts, decoded.outputs, strict=True)]
        rule, tokens = pass_flops(target, target.vocab_size), sum(map(len, decoded.outputs))
        self._work.flops += flops_of(rule, lengths, tokens)
        return decoded.outputs, states


def _is_complete(directory: Path) -> bool:
    """Whether a part exists. Raises UserError (CorruptArtifact) if it exists but is damaged."""
    if not directory.exists():
        return False
    verify_directory(directory)
    return True


@torch.inference_mode()
def _beam_search(
    target: Target, prompts: list[list[int]], settings: GenerateConfig
) -> list[list[int]]:
    """The best beam for each prompt, computed by `transformers` on padded prompts."""
    eos = list(target.eos_token_ids)
    pad = target.tokenizer.pad_token_id
    pad = pad if pad is not None else (eos or [0])[0]
    ids, mask = padded_prompts(prompts, pad, target.device, right=target.has_encoder)
    stated = stated_config(
        settings.sampling.build(),
        max_new_tokens=settings.max_new_tokens,
        eos_token_ids=eos,
        num_beams=settings.num_beams,
        pad_token_id=pad,
        **decoder_settings(target.model, limited=False),
    )
    with nothing_filled_in(target.model):
        texts = target.model.generate(ids, attention_mask=mask, generation_config=stated)
    answers = []
    for row in texts[:, 1 if target.has_encoder else ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        answers.append(row[:end])
    return answers
