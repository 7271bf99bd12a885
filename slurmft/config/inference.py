"""The section ``inference`` of the configuration: a batch of requests, or an endpoint, instead of a trainer."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slurmft.config.base import Count, Folder, Fraction, ObjectName, Positive, Seconds, Section, Text, Words
from slurmft.policy import values as plain
from slurmft.policy.inference import OF_ENGINES, OPENAI, engine_kind, with_another_path

# --- The section ``inference.serving`` of the configuration: an endpoint in front of the replicas ---


class ReplicasConfig(Section):
    """How many replicas are on: all, or as many as requests need."""

    min: Annotated[Count, Field(ge=0)] | None = None
    """The least; empty: all are always on. 0: with no request no engine runs, and the first one waits in its router
    until one is ready, which needs a ``request_timeout_s`` above the engine's start."""

    max: Positive | None = None
    """The most; empty: ``replicas_per_node`` times ``nodes``, or ``elastic.max_nodes``, which it cannot exceed. What
    ``nodes`` cannot hold runs on nodes that jobs of one node each lend while the load needs them."""

    idle_s: Annotated[Seconds, Field(gt=0)] = 300.0
    """Fewer replicas have to have been enough for so many seconds before one is stopped."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max is not None and self.min is None:
            raise ValueError("replicas.max: without replicas.min all replicas are always on; give it, 0 or more")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"replicas.min ({self.min}) is above replicas.max ({self.max})")
        return self


class WeightsConfig(Section):
    """How engines take the weights that a trainer publishes (``slurmft.publish_weights``)."""

    update_path: Text | None = None
    """Path of a POST at which the engine loads weights, such as SGLang's ``/update_weights_from_disk``, and answers
    once it has them. It is sent while the engine has no request; others wait, or go to other replicas. Empty: none."""

    update_body: Text = '{"path": "{path}", "version": {version}}'
    """JSON of that POST, in which ``{path}`` and ``{version}`` become those of the publication."""

    update_timeout_s: Annotated[Seconds, Field(gt=0)] = 600.0
    """Seconds for it; an engine that takes longer is started again."""

    version_path: Text | None = None
    """Path of a GET that answers the version of the engine's weights: a number, or a JSON object with it as ``version``
    or ``weight_version``. Asked after each update, which is made again unless it is the right one."""

    max_version_lag: Annotated[Count, Field(ge=0)] | None = None
    """An engine whose weights are more versions behind the newest publication gets no requests until it has newer ones;
    empty: any number. Weights from before a trainer went back to a checkpoint are never served once it has published
    again."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("update_path", "version_path"):
            if (path := getattr(self, name)) is not None and not re.fullmatch(r"/[^\s#]*", path):
                raise ValueError(f"weights.{name}: {path!r} is not a path such as /update_weights_from_disk")
        if self.update_path is None and (self.version_path is not None or self.max_version_lag is not None):
            raise ValueError("weights: version_path and max_version_lag need an update_path")
        try:
            json.loads(self.body_for("/weights", 0))
        except ValueError as error:
            raise ValueError(f"weights.update_body is not JSON with {{path}} and {{version}}: {error}") from error
        return self

    def body_for(self, path: str, version: int) -> str:
        """``update_body`` for these weights."""
        words = {"{path}": json.dumps(path)[1:-1], "{version}": str(version)}
        return re.sub(r"\{path\}|\{version\}", lambda found: words[found[0]], self.update_body)


class ServingConfig(Section):
    """An endpoint over HTTP: routers that clients talk to, in front of the replicas."""

    routers: Annotated[Positive, AfterValidator(plain.at_most(64))] = 2
    """Nodes with a router, the first ones of the job; each knows all replicas, and a client may use any of them."""

    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    """How many replicas are on."""

    port: Annotated[Count, AfterValidator(plain.at_most(65_535))] = Field(default=0, ge=0)
    """Port of every router; 0: a free one of each node, kept while its agent lives."""

    token_file: Folder | None = None
    """A file of mode 0600 with the token that clients must send as ``Authorization: Bearer``; empty: one is made in the
    run folder."""

    tls_certificate: Folder | None = None
    """A PEM file with the routers' certificate, and those that it depends on; empty: see ``tls_own``."""

    tls_key: Folder | None = None
    """Its private key, a PEM file of mode 0600."""

    tls_own: bool = True
    """Routers speak HTTPS with certificates that the run makes itself: an authority in its run folder, which clients
    trust (``serving/ca.pem``), and a new key and certificate for each start of a router, with the names and addresses
    of its node. Needs ``openssl`` on the nodes. Off where there is ``tls_certificate``; with false and none, routers
    speak plain HTTP, and any process at a dead one's port gets tokens and requests, and can forge answers."""

    max_queue: Count = Field(default=1024, ge=0)
    """Requests that may wait in a router for a free replica; more are refused at once with 429."""

    degraded_below: Fraction = 0.5
    """Share of the replicas: with fewer that are ready, each gets half as many requests at a time, time limits are
    doubled, and requests with ``X-Priority: low`` are refused with 503."""

    degraded_max_tokens: Positive | None = None
    """While the endpoint is degraded, completions and chats get at most so many tokens; empty: as they ask."""

    degraded_model: Text | None = None
    """While it is degraded, completions and chats are for this model, a smaller one that the engines have as well."""

    handover: bool = True
    """Before the time limit, at a preemption or a requeue, submit a successor job, which takes the endpoint over once
    its replicas are ready. It needs as many nodes again for a while. Not with ``preemption.continue_by: nothing``, and
    not without Slurm."""

    handover_lead_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds before the time limit at which the successor is submitted; empty: ``preemption.signal_lead_s``, 1.5 times
    as long as the replicas took to become ready, and 90 s. Not in the first half of a job."""

    restart_window_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """``max_restarts`` counts the restarts of a replica, or of a router, within these seconds."""

    max_header_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 20))] = 32_768
    """The longest header, and the longest request line, that a client may send."""

    max_body_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 32))] = 67_108_864
    """The longest body that a client may send."""

    max_held_bytes: Annotated[Positive, AfterValidator(plain.at_most(1 << 40))] = 1 << 30
    """The most that bodies of all requests may take of a router's memory; beyond it 503 with ``Retry-After``, before
    the body is read. A single one is always taken."""

    client_timeout_s: Annotated[Seconds, Field(gt=0)] = 30.0
    """Seconds for a client to send its request, and to take each part of the answer; a slower one is cut off."""

    allow_origins: tuple[Text, ...] = ()
    """Origins, such as ``https://chat.example.org``, whose pages may send requests from a browser (CORS); ``*`` is any.
    Empty: what engines say of it themselves, and no preflight, as those show no token."""

    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """How engines take weights that a trainer publishes."""

    access_log: bool = True
    """One line of JSON for each request in ``serving/access-NODE.log`` of the run folder, of 64 MiB and one before."""

    @model_validator(mode="before")
    @classmethod
    def _own_unless_given(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("tls_certificate") is not None and "tls_own" not in value:
            return {**value, "tls_own": False}
        return value

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give tls_certificate and tls_key, or neither")
        if self.tls_own and self.tls_certificate is not None:
            raise ValueError("give tls_own, or tls_certificate and tls_key")
        return self

    @property
    def is_https(self) -> bool:
        """Whether the routers speak HTTPS."""
        return self.tls_own or self.tls_certificate is not None


# --- The section ``inference`` of the configuration: a batch of requests, or an endpoint, instead of a trainer ---

MAX_CONCURRENCY = 4096
STANDARD_INPUT = Path("-")
PORT_WORD = "{port}"
SOCKET_WORD = "{socket}"

GANG_WORDS = ("{node_rank}", "{nodes}", "{head}", "{head_port}")

ONLY_BATCH = ("output", "on_bad_input", "tail_after_s", "commit_interval_s")
"""Keys without a meaning for an endpoint."""


class EngineConfig(Section):
    """What answers the requests. Exactly one of ``command``, ``callable``, ``process`` and ``url``."""

    command: Words | None = None
    """A server that each replica starts for itself; ``{port}`` becomes a free port of the node, ``{socket}`` the path
    of a Unix socket that no other user can reach, ``{replica}`` the replica's number on the node. vLLM, SGLang, TGI
    and llama.cpp are known by name."""

    nodes: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Nodes of one engine. With more than 1 each starts ``command``, in which ``{node_rank}`` becomes its number from 0
    on, ``{nodes}`` how many there are, ``{head}`` the address of the first one and ``{head_port}`` a free port there;
    requests go to the first one's ``{port}`` alone. When one ends or is lost, all are ended and started again, on other
    nodes where that is needed (``spare_nodes``)."""

    stage_in_memory: tuple[Text, ...] = ()
    """Files and folders of ``command``, by their absolute paths, that each node copies into its memory at the first
    start: the command gets the copies' paths, and an engine that is started again reads, or maps, them there. They go
    with the run on the node, and take as much of ``/dev/shm``."""

    callable: ObjectName | None = None
    """``package.module:name`` of a function that takes a list of requests and returns a list of answers in the same
    order, or of a class: it is built once with the device as its argument, and called the same way."""

    process: Words | None = None
    """A program that is started anew for each request and ends with its answer, as trials of a sweep are (``trials``):
    ``{name}`` becomes the value of that name in the request's body. See docs/how-to/trials.md."""

    nproc_per_node: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Ranks of one ``process`` on each of its nodes."""

    log_bytes: Annotated[Count, Field(ge=4096)] = 16 << 20
    """Most of the output of one ``process`` that is kept, its end."""

    url: Text | None = None
    """A service that is there already, such as ``http://host:8000``; slurmft starts and ends nothing."""

    ready_path: Text | None = None
    """Path that answers 200 once the engine can work; known engines have theirs, others ``/health``. One started by
    ``command`` that then says to a first request, of one token, that it cannot serve yet, is not ready: by 502, 503 or
    504, or by another error of a server that names it (not ready, not loaded, still loading, starting up)."""

    request_path: Text | None = None
    """Path for requests that name none themselves (``url`` in OpenAI's batch form)."""

    progress_metric: Text | None = None
    """A counter on ``metrics_path`` that grows while an answer is made, and not only at its end; known engines have
    theirs. Without one only bytes of answers are progress."""

    metrics_path: Text | None = None
    """Where the engine shows its counters."""

    continue_from_prefix: Literal["auto", "always", "never"] = "auto"
    """Whether an answer of a batch that a stop or a dead engine has cut off goes on where it was, with the text so far
    behind the prompt. ``auto``: of callables that are generators; ``always``: also texts (``/v1/completions``) of any
    engine, and chats by ``continue_final_message``, which may go on differently than they would have; ``never``:
    computed anew. Where it applies, engines are asked for streams."""

    allow_paths: tuple[Text, ...] = ()
    """Further paths that clients and lines of a batch may use, such as ``/v1/load_lora_adapter``, and those below them;
    ``/`` is all. By themselves open are those that ask for something: of OpenAI's interface, of known engines their own
    as well, ``request_path``, and ``ready_path`` to be read."""

    token_file: Folder | None = None
    """A file of mode 0600 with the token that the engine asks for; sent as ``Authorization: Bearer``."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in ("command", "callable", "process", "url") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give one of command, callable, process and url; given: {', '.join(given) or 'none'}")
        if self.command is not None and not any(PORT_WORD in word or SOCKET_WORD in word for word in self.command):
            raise ValueError(f"command must hold {PORT_WORD} or {SOCKET_WORD}: each replica listens on one of its own")
        words = (self.process and GANG_WORDS) or self.command or ()
        if self.nodes > 1 and not any(word in part for part in words for word in GANG_WORDS):
            raise ValueError(f"nodes: an engine over several needs a command with some of {', '.join(GANG_WORDS)}")
        for path in self.stage_in_memory:
            if not re.match(r"/+[^/]", path) or with_another_path(self.command or (), path, "") == (self.command or ()):
                raise ValueError(f"stage_in_memory: {path!r} is no absolute path that is in a word of command")
        return self

    @property
    def is_http(self) -> bool:
        """Whether it is asked by HTTP, which has paths."""
        return self.callable is None and self.process is None

    @property
    def open_paths(self) -> tuple[str, ...]:
        """What clients and lines of a batch may use, for ``policy.inference.is_open``."""
        kind = engine_kind(self.command or ())
        asked, ready = self.request_path or kind.request_path, self.ready_path or kind.ready_path
        given = (asked.partition("?")[0], f"GET {ready.partition('?')[0]}", *self.allow_paths)
        return (*OPENAI, *OF_ENGINES.get(kind.name, ()), *given)

    @field_validator("allow_paths")
    @classmethod
    def _are_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not re.fullmatch(r"/[^\s?#%]*", path):
                raise ValueError(f"{path!r} is not a path such as /v1/load_lora_adapter")
        return value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", value):
            raise ValueError(f"{value!r} is not of the form http://host:port; a token belongs into token_file")
        return value.rstrip("/") if value else value

    @field_validator("ready_path", "request_path", "metrics_path")
    @classmethod
    def _begins_with_a_slash(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"/[^\s#]*", value):
            raise ValueError(f"{value!r} is not a path such as /health")
        return value


class InferenceConfig(Section):
    """Replicas of an engine, which answer requests from files, or those of clients (``serving``)."""

    input: Folder | None = None
    """A file of requests (``.jsonl``, also ``.gz`` and ``.zst``; ``.parquet``), a folder of such files, or ``-`` for
    standard input. Each line is a request in OpenAI's batch form, or any object, which is then the body. Exactly one of
    ``input`` and ``serving``."""

    serving: ServingConfig | None = None
    """An endpoint for clients instead of a batch; ``slurmft serve`` submits it."""

    output: Folder | None = None
    """Folder for ``answers`` and ``errors``, in the order of the input; ``output`` in the run folder when empty. Or one
    file for all of them, whose name ends in ``.jsonl`` or ``.parquet``."""

    output_format: Literal["jsonl", "parquet"] = "jsonl"
    """``jsonl``: OpenAI's batch form. ``parquet``: the same as columns of texts, ``response`` and ``error`` in JSON."""

    part_requests: Count = Field(default=10_000, ge=0)
    """While the batch runs, each so many requests of the input that are all answered are put into files in ``parts`` of
    the output, to be looked at; they are deleted when the whole output is there. 0: none."""

    engine: EngineConfig
    replicas_per_node: Annotated[Positive, AfterValidator(plain.at_most(1024))] = 1
    """Engines on each node."""

    gpus_per_replica: Annotated[Count, AfterValidator(plain.at_most(64))] = Field(default=1, ge=0)
    """GPUs that each engine sees, where the node has any; 0: all of them. One engine over several nodes sees so many on
    each (``engine.nodes``)."""

    concurrency: Annotated[Positive, AfterValidator(plain.at_most(MAX_CONCURRENCY))] = 32
    """Requests at a time for each replica; for a callable the longest list. Halved when it runs out of memory."""

    on_bad_input: Literal["refuse", "report"] = "refuse"
    """A line that is no request: refuse the whole input before anything starts, or report it in errors.jsonl."""

    request_timeout_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """Seconds that one try of a request may take."""

    max_retries: Count = Field(default=3, ge=0)
    """Further tries of a request that fails without an answer: connection, time-out, 429, 5xx."""

    base_delay_s: Annotated[Seconds, Field(ge=0)] = 1.0
    """Seconds before the second try; doubled for each further one, with jitter."""

    max_delay_s: Annotated[Seconds, Field(ge=0)] = 30.0
    """The longest pause between two tries."""

    max_restarts: Count = Field(default=3, ge=0)
    """Restarts of a replica without a completed request in between; then it stays down."""

    startup_timeout_s: Annotated[Seconds, Field(gt=0)] = 2400.0
    """Seconds an engine may take until it is ready: large models need 2 to 40 minutes."""

    hang_timeout_s: Annotated[Seconds, Field(gt=0)] = 600.0
    """Seconds without a byte of an answer and without a new token, while requests are in flight, that count as a hang
    of an engine which does not answer the smallest request either. Requests of more than 64 KiB, or without a counter
    of tokens more than 1024 of those, have up to ten times as long."""

    tail_after_s: Annotated[Seconds, Field(gt=0)] = 60.0
    """At the end of the batch: seconds after which a request in flight is also given to an idle replica."""

    partial_expires_after_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """Seconds after which the beginning of an unfinished answer is not continued any more."""

    commit_interval_s: Annotated[Seconds, Field(gt=0)] = 0.25
    """Seconds between two commits of a replica's answers."""

    @model_validator(mode="before")
    @classmethod
    def _with_paths_of_the_engine(cls, value: Any) -> Any:
        """Configurations that runs have kept have them in another section."""
        match value:
            case {"serving": {"allow_paths": paths, **serving}, "engine": {**engine}}:
                return {**value, "serving": serving, "engine": {"allow_paths": paths, **engine}}
        return value

    @model_validator(mode="after")
    def _is_batch_or_endpoint(self) -> Self:
        if (self.input is None) == (self.serving is None):
            raise ValueError("give one of input (a batch) and serving (an endpoint)")
        if self.engine.nodes > 1 and (
            self.replicas_per_node > 1 or (self.serving and self.serving.replicas.min is not None)
        ):
            raise ValueError("engine.nodes: with more than 1 there is one engine on a node, and none follows the load; "
                             "remove replicas_per_node and serving.replicas")  # fmt: skip
        if self.serving is not None:
            if self.engine.continue_from_prefix == "always":
                raise ValueError(
                    "engine.continue_from_prefix: streams of an endpoint do not go on elsewhere; remove it"
                )
            if self.engine.command is None:
                raise ValueError("engine.command: an endpoint needs a server that each replica starts for itself")
            given = [key for key in ONLY_BATCH if getattr(self, key) != type(self).model_fields[key].default]
            if given:
                raise ValueError(f"{', '.join(given)}: without a meaning for an endpoint; remove it")
        return self

    def replicas_on(self, nodes: int) -> int:
        """Engines that there should be on so many nodes."""
        return nodes // self.engine.nodes * self.replicas_per_node

    @property
    def doubles_after_s(self) -> float:
        """``tail_after_s``; never for processes, of which two with one folder would be in each other's way."""
        return math.inf if self.engine.process is not None else self.tail_after_s

    @property
    def from_stdin(self) -> bool:
        """Requests come from standard input."""
        return self.input == STANDARD_INPUT

    @property
    def output_file(self) -> Path | None:
        """The one file for all answers and errors; None where they are two in a folder."""
        return self.output if self.output is not None and self.output.suffix in (".jsonl", ".parquet") else None

    def output_folder(self, run_folder: Path) -> Path:
        """The folder of the output, and of its parts."""
        return run_folder / "output" if self.output is None or self.output_file is not None else self.output


# --- The section ``trials``: a sweep, of which each trial is a process of its own ---

MAX_TRIALS = 1_000_000
"""Of one sweep: each costs a folder, and 50 bytes of the supervisor's memory; 400 where ``next`` names it."""

MAX_JOBS = 1024

_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")


def _numbers_in(value: Any) -> Any:
    """A configuration's fractions are texts until the field that takes them is known."""
    match value:
        case str() if _FRACTION.fullmatch(value) and math.isfinite(number := float(value)):
            return number
        case dict():
            return {key: _numbers_in(each) for key, each in value.items()}
        case [*_]:
            return [_numbers_in(each) for each in value]
    return value


class TrialsConfig(Section):
    """What to try. Exactly one of ``list``, ``grid``, ``file`` and ``next``."""

    list: tuple[dict[str, Any], ...] | None = None
    """The parameters of each trial. ``custom_id`` among them is the trial's name; else they themselves are. A list in
    the place of the whole section is this one."""

    grid: dict[str, tuple[Any, ...]] | None = None
    """Values for each parameter; every combination is a trial, the last parameter changing first. What reads as a
    number is one, here and in ``list``; ``file`` tells texts from numbers."""

    file: Folder | None = None
    """JSON lines, each as an element of ``list``. A path in the place of the whole section is this one."""

    next: ObjectName | None = None
    """``package.module:name`` of a function that is asked for the next trial while the sweep runs, with the rows of
    those that have ended since the last call; it returns parameters, or a list of them, or None at the end."""

    callable: ObjectName | None = None
    """``package.module:name`` of a function to call with the parameters, in place of ``command``; what it returns is
    the result."""

    nodes: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Nodes of one trial, all of one job. Each job of the sweep has so many, the run's own a multiple of it where
    ``nodes`` says so; with more than 1 ``per_node`` is 1."""

    nproc_per_node: Annotated[Positive, AfterValidator(plain.at_most(64))] = 1
    """Ranks of one trial on each of its nodes; several in all have the variables of torch: ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and so on. Rank 0's result is the trial's."""

    per_node: Annotated[Positive, AfterValidator(plain.at_most(1024))] = 1
    """Trials at a time on each node."""

    gpus: Annotated[Count, AfterValidator(plain.at_most(64))] = Field(default=0, ge=0)
    """GPUs that each trial sees, on each of its nodes; 0: all of them."""

    max_jobs: Annotated[Positive, AfterValidator(plain.at_most(MAX_JOBS))] = 1
    """Most jobs at a time: the run's own, and more of ``nodes`` each, as long as there are trials for them."""

    retries: Count = Field(default=0, ge=0)
    """Further tries of a trial that fails by itself. What a lost node or a stop has cut off is no try."""

    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds that one try may take; none when empty."""

    log_bytes: Annotated[Count, Field(ge=4096)] = 16 << 20
    """Most of a trial's output that is kept, its end; ``log.txt`` in its folder."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        match value:
            case [*_]:
                return {"list": value}
            case str():
                return {"file": value}
        return value

    @field_validator("list", "grid", mode="before")
    @classmethod
    def _fractions_are_numbers(cls, value: Any) -> Any:
        return _numbers_in(value)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in ("list", "grid", "file", "next") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of list, grid, file and next; given: {', '.join(given) or 'none'}")
        if self.grid is not None and (count := math.prod(map(len, self.grid.values()))) > MAX_TRIALS:
            raise ValueError(f"grid: {count} trials are more than {MAX_TRIALS}; ask for them with next, or sample")
        if self.grid is not None and not all(self.grid.values()):
            raise ValueError("grid: each parameter needs a value")
        if self.nodes > 1 and self.per_node > 1:
            raise ValueError(f"per_node ({self.per_node}) must be 1 with nodes ({self.nodes}) above 1")
        return self

    def as_inference(self, command: tuple[str, ...], run_folder: Path) -> InferenceConfig:
        """The batch that a sweep is: each trial a request, whose engine is a process of its own."""
        if self.callable is not None:
            command = (sys.executable, "-m", "slurmft.inference.trial_call", self.callable)
        engine = EngineConfig(process=command, continue_from_prefix="never", log_bytes=self.log_bytes,
                              nodes=self.nodes, nproc_per_node=self.nproc_per_node)  # fmt: skip
        timeout: dict[str, Any] = {} if self.timeout_s is None else {"request_timeout_s": self.timeout_s}
        return InferenceConfig(
            input=run_folder / "inference" / "requests.jsonl", engine=engine, replicas_per_node=self.per_node,
            gpus_per_replica=self.gpus, concurrency=1, max_retries=self.retries, part_requests=0, **timeout,
        )  # fmt: skip
