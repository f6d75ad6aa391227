"""`generate`: the target answers prompts, because drafters learn best from the target's text. The
answer to a row with a `json_schema` is held to it.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
from distill.teacher.cache_parts import check_parts, note_checked, text_sha256
from distill.teacher.cached_features import bytes_per_token, describe_source, write_features
from distill.teacher.kept_states import KeptStates, OneMore
from train.base.console import Bar
from train.base.stage import STAGES, Stage, StageMemory, StagePlan, StageResult, StageWork
from train.data.corpus import PART, SELF_PROMPTS, read_answers, unusable_answers, write_answers
from train.data.read import Example, id_key, select, spread
from train.data.row_grammars import row_grammars
from train.data.self_prompts import read_prompts, require_template, save_prompts, write_prompts
from train.data.turns import Turns
from train.engines.answers.known_parts import AnswerPart, Jobs, part_meta, prompt_key, take_over
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
    """Writes part-0, part-1, …, each a directory with a file of one answer per line. A kill loses
    at most one part of each rank. Beside them are, in parts of the same numbers, the hidden states
    that later stages ask for (`distill.teacher.cached_features`)."""

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
            jobs = self._jobs()
            self._require_schemas(jobs.examples)
            count, what = len(jobs), ""
            measured = (example for example, _ in spread(jobs, PROMPTS_MEASURED))
            prompt = prompt_length(self.corpus, measured)
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
            disk_bytes=count * config.max_new_tokens * ID_BYTES,
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
                # vLLM's files, until a part is whole.
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
        generated = self._generate(self._jobs())
        answers = tokens = cut = 0
        prompts, ends = set(), set(self.target.eos_token_ids)
        for answer in read_answers(self.directory):
            answers, tokens = answers + 1, tokens + len(answer["tokens"])
            cut += answer["tokens"][-1] not in ends
            prompts.add(id_key(answer["id"]))
        if not answers:
            raise UserError(
                f"stage {self.config.name} has no usable answer; see server.max_unusable"
            )
        seconds = time.perf_counter() - begin
        summary: dict[str, Any] = {
            "prompts": len(prompts),
            "answers": answers,
            "tokens": tokens,
            "cut_at_limit": cut,
            "tokens_per_second": generated / seconds if generated else None,
        }
        self.reporter.say(
            f"  {answers} answers, {tokens} tokens, {cut} cut at {self.config.max_new_tokens} "
            "tokens"
        )
        if self.config.server:
            left_out, retokenized = unusable_answers(self.directory)
            why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            summary |= {"left_out": why or "0", "retokenized": retokenized}
            self.reporter.say(f"  left out: {why or 'none'}; {retokenized} retokenised")
        return StageResult(summary=summary, work=self._work)

    def _jobs(self) -> Jobs:
        config = self.config
        examples: Sequence[Example]
        if config.self_prompts:
            examples = read_prompts(self.directory / SELF_PROMPTS)
            examples = self.corpus.askable(examples, f"prompts of {config.name}")
        else:
            answerable = self.corpus.answerable(config.split, config.name)
            if config.turns == "every":
                turns = Turns.of(answerable)
                answerable = self.corpus.askable(turns, f"turns of {config.split}")
            examples = select(answerable, spread(range(len(answerable)), config.prompts))
        return Jobs(examples, config.samples, range(config.samples * len(examples)))

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
                save_prompts(directory, config.name, written)
                remove_directory(drawn)
            left_out = "".join(f", {count} {reason}" for reason, count in written.dropped.items())
            self.reporter.say(f"  the target wrote {len(written.texts)} prompts{left_out}")
        self.accelerator.wait_for_everyone()

    def _generate(self, jobs: Jobs) -> int:
        """Write every missing part, with all ranks together. Returns the number of tokens that they
        generated."""
        ranks, states = Ranks.of(self.accelerator), self.directory / STATES
        parts = self._parts(jobs, ranks)
        # Those of an earlier start; the writer hashes each of the others.
        ranks.together(lambda: check_parts(ranks.share(parts_of(states))))

        def take_apart() -> None:
            if count := take_over(self.directory, parts, self._made_by):
                self.reporter.say(
                    f"  the rows of {count} parts changed; answers to the same prompts are kept"
                )

        ranks.together(lambda: take_apart() if ranks.is_main else None)
        # Each rank writes complete parts without communication, so no rank waits.
        missing = [part for part in ranks.share(parts) if not part.directory.exists()]
        generated = 0
        with self.reporter.bar("generating", len(jobs)) as bar:
            if self.config.server:
                generated = self._ask_server(jobs, missing, bar)
            else:
                examples = [example for part in missing for example, _ in part.jobs]
                grammars, begin = row_grammars(examples, self.target), time.perf_counter()
                generated = sum(self._write_part(part, grammars, bar) for part in missing)
                self._work.seconds = time.perf_counter() - begin
            bar.update(len(jobs))
        self.accelerator.wait_for_everyone()
        if ranks.is_main and parts_of(states):
            note_checked(states, "states")
        return sum(ranks.gather(generated))

    @property
    def _made_by(self) -> dict[str, Any]:
        """The settings that decide what is answered to a prompt."""
        names = {"sampling", "max_new_tokens", "num_beams", "seed"}
        return self.config.model_dump(mode="json", include=names)

    def _parts(self, jobs: Jobs, ranks: Ranks) -> list[AnswerPart]:
        """All parts. Every prompt is written now: a row is known by it, and one that cannot be
        written is found before the first part begins."""

        def prompt_keys() -> list[str]:
            rows = range(ranks.rank, len(jobs.examples), ranks.world)
            mine = select(jobs.examples, rows)
            return [prompt_key(self.corpus.prompt(one), one.schema) for one in mine]

        shares = ranks.gather(ranks.together(prompt_keys))
        keys = [shares[row % ranks.world][row // ranks.world] for row in range(len(jobs.examples))]
        split, size = self.config.split, self.config.part_prompts
        parts = list[AnswerPart]()
        for first in range(0, len(jobs), size):
            part = jobs[first : first + size]
            named = {
                row: f"{keys[row // jobs.samples]}-{row % jobs.samples}"
                for row in range(first, first + len(part))
            }
            meta = part_meta(
                named.values(), self._made_by, SELF_PROMPTS if self.config.self_prompts else split
            )
            parts.append(AnswerPart(self.directory / f"{PART}{len(parts)}", part, named, meta))
        return parts

    def _ask_server(self, jobs: Jobs, parts: list[AnswerPart], bar: Bar) -> int:
        """Write these parts from a server's answers."""
        from train.engines.answers.answer_parts import write_server_parts  # needs the extra serve

        config = self.config
        assert config.server is not None
        done = len(jobs) - sum(len(part.jobs) for part in parts)
        return write_server_parts(
            parts,
            jobs.examples,
            self.corpus,
            self.target,
            config.server,
            AskSettings(
                config.sampling.build(),
                config.max_new_tokens,
                config.seed,
                self.target.eos_token_ids,
            ),
            directory=self.directory,
            ranks=Ranks.of(self.accelerator),
            layers=self._kept_layers,
            on_states=self._write_states,
            on_progress=lambda answered, note: bar.update(done + answered, note),
            say=lambda problem: self.reporter.say(f"  {problem}"),
        )

    def _write_part(
        self, part: AnswerPart, grammars: Mapping[str | None, Grammar], bar: Bar
    ) -> int:
        """Returns the number of tokens that were generated. grammars: by the schemas of rows."""
        # With answers that other parts had.
        answers = {row: answer.tokens for row, answer in part.journal.read(part.keys).items()}
        jobs = list(zip(part.keys, part.jobs, strict=True))
        missing = [
            (row, self.corpus.prompt(e), grammars.get(e.schema))
            for row, (e, _) in jobs
            if row not in answers
        ]
        # Prompts of similar length come together: less padding. Equal ones are read once.
        missing.sort(key=lambda item: (len(item[1]), item[1]))
        row_ids = [row for row, *_ in missing]
        first = min(part.keys) + len(answers)
        prompts, held = [prompt for _, prompt, _ in missing], [grammar for *_, grammar in missing]
        outputs, states = self._answer(prompts, held, row_ids, first, bar)
        answers |= dict(zip(row_ids, outputs, strict=True))
        if states:
            texts = [prompt + answer for prompt, answer in zip(prompts, outputs, strict=True)]
            read = zip(row_ids, texts, strict=True)
            self._write_states(part, answers, {row: (text, states[row]) for row, text in read})
        write_answers(
            part.directory,
            (
                {"id": e.id, "sample": sample, "key": part.keys[row], "tokens": answers[row]}
                for row, (e, sample) in jobs
            ),
            part.meta,
        )
        part.journal.remove()
        return sum(map(len, outputs))

    def _write_states(
        self,
        part: AnswerPart,
        answers: Mapping[int, list[int]],
        kept: Mapping[int, tuple[list[int], dict[int, Tensor]]],
    ) -> None:
        """Write the states that a part's rows have, as a later stage looks for them: those of the
        samples that a training has of their answers. kept: what the target read of a row, and its
        states."""
        names, stored = list[tuple[str, str]](), defaultdict[int, list[Tensor]](list)
        cache = max(self._readers, key=lambda cache: cache.max_length)
        longest = min(cache.max_length, self.target.max_positions)
        for row, (example, number) in zip(part.keys, part.jobs, strict=True):
            if row not in kept:
                continue
            read, states = kept[row]
            sample = self.corpus.answered(example, self.config.name, number, answers[row])
            if len(sample.tokens) > longest and cache.on_long == "drop":
                continue
            sample = sample.cut(longest)
            length = len(sample.tokens)
            row_states = {layer: x[:length] for layer, x in states.items()}
            complete = all(len(x) == length for x in row_states.values())
            if any(sample.mask) and complete and sample.tokens == read[:length]:
                names.append((sample.id, text_sha256(sample.tokens, sample.mask)))
                for layer, x in row_states.items():
                    stored[layer].append(x)
        if names:
            number = int(part.directory.name.removeprefix(PART))
            write_features(self.directory / STATES, number, names, stored, self._made_with)

    @cached_property
    def _made_with(self) -> dict[str, Any]:
        return describe_source(self.target)

    def _answer(
        self,
        prompts: list[list[int]],
        grammars: list[Grammar | None],
        row_ids: list[int],
        first: int,
        bar: Bar,
    ) -> tuple[list[list[int]], dict[int, dict[int, Tensor]]]:
        """The answers, and the hidden states of each row that later stages ask for. They lack
        that of a text's last token if it ends a grammar's text or fills the target's context. Each
        answer's FLOPs include its whole prompt, also where equal prompts are read once."""
        config, target = self.config, self.target
        answers: list[list[int]] = []
        states: dict[int, dict[int, Tensor]] = {}
        if not prompts:
            return answers, states
        if config.num_beams > 1:
            for begin in range(0, len(prompts), config.batch_size):
                answers += _beam_search(target, prompts[begin : begin + config.batch_size], config)
                bar.update(first + len(answers))
            return answers, states
        ended = itertools.count(first + 1)
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
            bar.update(next(ended))
            if self._kept_layers:
                states[row_ids[number]] = keeper.take(number)

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
