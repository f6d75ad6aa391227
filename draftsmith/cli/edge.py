"""Drafting here and verifying there: `verify-server`, and the options of `generate` for it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import CallerOptions, Loading, key_from, require_packages
from train.base.console import quieten

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from decode.model.loading import Target
    from decode.settings import DecodeSettings
    from decode.text_stream import Stop
    from draftsmith.edge.client import EdgeClient
    from draftsmith.edge.link import Link


@dataclass(frozen=True, kw_only=True)
class Verifying:
    """Where drafts are verified."""

    verifier: Annotated[
        str | None,
        typer.Option(
            help="ws://HOST:PORT of `verify-server`: draft here, verify there. Of --target, only "
            "the tokenizer is then loaded"
        ),
    ] = None
    verifier_key_env: Annotated[
        str | None, typer.Option(help="environment variable with the verifier's key")
    ] = None
    rounds: Annotated[
        Path | None, typer.Option(help="write every draft with its verdict here, as JSON lines")
    ] = None

    def check(self, trace: bool) -> None:
        """Raise UserError for options that do not go together."""
        if self.verifier is None and (self.rounds or self.verifier_key_env):
            raise UserError(
                "--rounds and --verifier-key-env are for drafts that a server verifies; name it "
                "with --verifier"
            )
        if self.verifier is not None and trace:
            raise UserError(
                "--trace prints p, which a verifier does not send; leave it out, or --verifier"
            )

    def link(self) -> "Link | None":
        """The line to the verifier, None without one."""
        if self.verifier is None:
            return None
        key = key_from("--verifier-key-env", self.verifier_key_env)
        require_packages("websockets", "msgpack")
        from draftsmith.edge.link import Link

        link = Link(self.verifier, key)
        link.ready()
        return link

    def report(self, client: "EdgeClient", say: Callable[[str], None]) -> None:
        """Say what the rounds cost, and write them."""
        from decode.base.artifact import write_file
        from draftsmith.edge.client import summary

        figures = summary(client.rounds)
        said = ", ".join(f"{name} {value}" for name, value in figures.items())
        say(f"[verifier: {said}]")
        if self.rounds:
            lines = [json.dumps(one.to_dict()) + "\n" for one in client.rounds]
            write_file(self.rounds, "".join(lines))


def remote_target(link: "Link", loading: Loading) -> "Target":
    """The verifier's target, with the tokenizer of --target."""
    from decode.model.chat_template import set_template_args
    from decode.model.without_weights import load_tokenizer
    from draftsmith.edge.client import RemoteTarget

    if loading.placement["device_map"] is not None:
        raise UserError(
            "--device-map places a target, but with --verifier the target is on the server; give "
            "the option to draftsmith verify-server"
        )
    tokenizer, fingerprint = load_tokenizer(loading.target)
    set_template_args(tokenizer, loading.template_args)
    return RemoteTarget(link, tokenizer, fingerprint, dtype=loading.dtype, device=loading.device)


def edge_client(
    link: "Link", drafter: "Drafter", settings: "DecodeSettings", stop: "Stop | None"
) -> "EdgeClient":
    """A client with these settings. Raises UserError if they name another rule than the server
    has."""
    from decode.base.registry import Choice
    from draftsmith.edge.client import EdgeClient

    rule = link.welcome["rule"]
    if settings.rule is not None and str(Choice.of(settings.rule)) != rule:
        raise UserError(
            f"the verifier judges by {rule}, not by {Choice.of(settings.rule)}; leave --rule "
            "out, or start the server with that rule"
        )
    return EdgeClient(
        link,
        settings.shaped(drafter),
        gamma=settings.gamma,
        policy=settings.policy,
        sampling=settings.sampling,
        draft_temperature=settings.draft_temperature,
        stop=stop,
    )


def verify_server(
    *,
    loading: Loading,
    rule: Annotated[
        str,
        typer.Option(help="coupled (lossless), or threshold:threshold=θ (lossy; see `calibrate`)"),
    ] = "coupled",
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8100,
    api_key_env: Annotated[
        str | None, typer.Option(help="environment variable with the key that edges must send")
    ] = None,
    callers: CallerOptions,
) -> None:
    """Hold the target and verify the drafts of edges: `generate --verifier ws://HOST:PORT`."""
    key = key_from("--api-key-env", api_key_env)
    require_packages("prometheus_client", "starlette", "uvicorn", "websockets", "msgpack")
    from decode.base.threads import run_in_thread
    from draftsmith.edge.sessions import SessionBounds
    from draftsmith.edge.verifier import Verifier, make_verified_rule
    from draftsmith.edge.verify_server import VerifyServer
    from draftsmith.net.limits import ServerLimits
    from draftsmith.net.listen import address_of, bind

    quieten()
    guard = callers.guard(host, key, None)
    limits, given = callers.bounds(ServerLimits(), SessionBounds)
    bounds = SessionBounds(**given)
    make_verified_rule(rule)
    # Before the target is loaded: a port that is taken must not cost that time.
    with bind(host, port) as bound:
        verifier = run_in_thread(
            lambda: Verifier(loading.load(only_decodes=True), rule, bounds)
        ).result()
        server = VerifyServer(verifier, bound, guard, limits)
        address = f"ws://{address_of(host, bound)}"
        what = f"{loading.target} verifies by {verifier.rule_name} at {address}"
        server.run(lambda: typer.echo(what), signals=True)
