"""Continuous batching: the steps of an engine whose clients each send their next request when the last one is complete.

The steps are simulated from the first request to the last one. Between two requests that begin or end all steps are alike, and are
taken together, so that the work does not grow with the number of generated tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import Final, NamedTuple

from analyzer.inference.serving.step import StepWork

MOST_STEPS: Final = 200_000
"""Most steps with prompts that are simulated, so that a report takes seconds."""
GOLDEN: Final = 0.6180339887498949
"""Multiples of it modulo 1 spread lengths equally, without random numbers."""
SOON: Final = 1e-9
"""Seconds. A request that arrives so late waits for one step."""
FINE: Final = 0.04
"""Numbers of requests and lengths are rounded to steps of 4 %, so that few different steps are calculated."""


class Load(NamedTuple):
    """What clients ask for, and how an engine forms steps."""

    clients: int
    requests: int
    """Of each client."""
    prompt: int
    generate: int
    spread: float
    prefix: float
    chunk: int
    """Most tokens of a step with prompts, of each group."""
    chunked: bool
    mixed: bool
    groups: int
    """Groups of ranks with different requests."""
    slots: int
    """Most requests that the engine runs at the same time."""
    cache_tokens: int
    """Tokens that the cache of all groups has room for."""
    wait_steps: int = 0
    """Most steps of decode that prompts wait for further ones."""
    wait_share: float = 1.0
    """Share of `chunk` from which on prompts do not wait."""
    receive_steps: int = 1
    """Steps of decode after which the engine looks for new requests."""
    captured: int = 0
    """Most tokens of a step with prompts that is replayed as CUDA graphs, except for its attention."""
    tokens_per_step: float = 1.0
    drafts: int = 0
    prefill_replicas: int = 0
    """Replicas that only compute prompts, for this one."""
    prompt_groups: int = 1
    """Groups of ranks with different requests in each of these."""
    busy: float = 1.0
    """Replicas that generate for which one of those works."""
    transfer: float = 0.0
    """Seconds to send the cache of a prompt to the replica that generates."""


class Served(NamedTuple):
    """What the clients see."""

    first: float
    """Mean seconds from a request to its first token, without those outside the engine."""
    first_later: float
    """The same without the first request of each client, which all clients send together."""
    token: float
    """Mean seconds of an output token after the first one."""
    tokens_per_second: float
    """Generated tokens of the replica."""
    running: float
    """Mean number of requests that generate."""
    prompt_share: float
    """Share of the time in steps with prompts."""
    waits: bool
    """Requests wait for room in the cache."""


@dataclass(slots=True)
class _Request:
    arrived: float
    prompt: int
    cached: int
    output: int
    wave: int
    number: int
    computed: int = 0
    first: float = 0.0


@dataclass(slots=True)
class _Group:
    """The tokens of prompts of one group in a step."""

    room: int
    tokens: int = 0
    pairs: float = 0.0
    prompts: int = 0


@dataclass(slots=True)
class _Sums:
    first: float = 0.0
    first_later: float = 0.0
    later: int = 0
    token: float = 0.0
    measured: int = 0
    complete: int = 0
    generated: int = 0
    decoding: float = 0.0
    prompts: float = 0.0
    waits: bool = False


def rounded(number: float) -> int:
    """A number rounded to steps of 4 %; small ones are kept."""
    return round(number) if number <= 24 else round(exp(round(log(number) / FINE) * FINE))


@dataclass
class Simulation:
    """The steps of a replica."""

    load: Load
    seconds: Callable[[StepWork], float]
    now: float = 0.0
    made: float = 0.0
    """Tokens that a request has generated which runs since the start."""
    waiting: deque[_Request] = field(default_factory=deque)
    prompts: deque[_Request] = field(default_factory=deque)
    running: list[tuple[float, int, _Request]] = field(default_factory=list)
    arriving: list[tuple[float, int, _Request]] = field(default_factory=list)
    """Requests with the time at which the engine sees them; with replicas for prompts, at which they can generate."""
    free: list[float] = field(default_factory=list)
    """When each of these replicas is free."""
    used: int = 0
    """Tokens of the cache that are reserved."""
    lengths: float = 0.0
    """Sum of the lengths of running requests, less the tokens of `made` for each."""
    waited: int = 0
    """Steps that prompts have waited for further ones."""
    unread: int = 0
    """Steps of decode since the engine looked for new requests."""
    number: int = 0
    left: int = 0
    known: dict[StepWork, float] = field(default_factory=dict)
    sums: _Sums = field(default_factory=_Sums)

    def run(self) -> Served:
        """Runs all requests."""
        load = self.load
        self.left = load.clients * load.requests
        self.free = [0.0] * load.prefill_replicas
        for _ in range(load.clients):
            self._send()
        while self.sums.complete < load.clients * load.requests:
            self._admit()
            if self.prompts and not self._prompts_wait():
                self._prompt_step()
            else:
                self._generate()
        return self._served()

    def _served(self) -> Served:
        sums, total = self.sums, self.sums.complete
        return Served(
            first=sums.first / total,
            first_later=sums.first_later / sums.later if sums.later else sums.first / total,
            token=sums.token / max(1, sums.measured),
            tokens_per_second=sums.generated / self.now,
            running=sums.decoding / self.now,
            prompt_share=sums.prompts / self.now,
            waits=sums.waits,
        )

    def _send(self) -> None:
        """A client sends a request."""
        if not self.left:
            return
        load = self.load
        self.left -= 1
        self.number += 1
        scale = [1 - load.spread * (self.number * GOLDEN**power % 1) for power in (1, 2)]
        prompt = max(1, round(load.prompt * scale[0]))
        cached = min(prompt - 1, int(prompt * load.prefix))
        request = _Request(
            self.now,
            prompt - cached,
            cached,
            max(1, round(load.generate * scale[1])),
            (self.number - 1) // load.clients,
            self.number,
        )
        if self.free:
            heapq.heappush(self.arriving, (self._computed_elsewhere(request), self.number, request))
        else:  # the engine has already issued the next step when a client gets its last token
            heapq.heappush(self.arriving, (self.now + (SOON if self.now else 0.0), self.number, request))

    def _computed_elsewhere(self, request: _Request) -> float:
        """The time at which a replica for prompts has computed a request. Those that wait are computed together."""
        place = min(range(len(self.free)), key=self.free.__getitem__)
        begin = max(request.arrived, self.free[place])
        most = max(1, self.load.chunk // request.prompt) * self.load.prompt_groups
        together = most if begin > request.arrived else 1
        per_group = ceil(together / self.load.prompt_groups)
        group = _Group(0, request.prompt * per_group, per_group * self._pairs(request, request.prompt), per_group)
        spent = self._cost(group, request.prompt * together, 0) / together
        # prompts of the other replicas are computed in the same steps, as far as these have room
        self.free[place] = begin + spent * max(1.0, self.load.busy * together / most)
        request.first = begin + spent
        return begin + spent + self.load.transfer

    @staticmethod
    def _pairs(request: _Request, tokens: int) -> float:
        return tokens * (request.cached + request.computed + tokens / 2)

    def _admit(self) -> None:
        """Requests whose tokens the cache has room for begin."""
        looks = not self.unread or not self.running or self.free
        while looks and self.arriving and self.arriving[0][0] <= self.now:
            self.waiting.append(heapq.heappop(self.arriving)[2])
        while self.waiting:
            request = self.waiting[0]
            size = request.prompt + request.cached + request.output
            full = len(self.running) + len(self.prompts) >= self.load.slots
            if full or (self.used + size > self.load.cache_tokens and self.used):
                self.sums.waits = True
                return
            self.waiting.popleft()
            self.used += size
            if self.free:
                self._start(request)
            else:
                self.prompts.append(request)

    def _start(self, request: _Request) -> None:
        """A request has its first token."""
        sums = self.sums
        request.first = request.first or self.now
        seconds = request.first - request.arrived
        sums.first += seconds
        if request.wave:
            sums.first_later += seconds
            sums.later += 1
        heapq.heappush(self.running, (self.made + request.output - 1, request.number, request))
        self.lengths += request.prompt + request.cached - self.made

    def _prompts_wait(self) -> bool:
        """Whether the engine waits for further prompts, and generates in the meantime."""
        load = self.load
        if not self.running or self.waited >= load.wait_steps:
            return False
        if load.groups > 1:
            return len(self.prompts) < load.groups
        tokens = len(self.running) * (1 + load.drafts)
        for request in self.prompts:
            rest = request.prompt - request.computed
            if not load.chunked and tokens + rest > load.chunk:
                break
            tokens += rest
            if tokens >= load.wait_share * load.chunk:
                return False
        return tokens < load.wait_share * load.chunk

    def _prompt_step(self) -> None:
        load = self.load
        self.waited = self.unread = 0
        generating = len(self.running) if load.mixed else 0
        of_group = ceil(generating / load.groups)
        groups = [_Group(max(1, load.chunk - of_group * (1 + load.drafts))) for _ in range(load.groups)]
        done: list[_Request] = []
        while self.prompts:
            request = self.prompts[0]
            group = max(groups, key=lambda each: each.room)
            rest = request.prompt - request.computed
            take = min(rest, group.room) if load.chunked else rest
            if take <= 0 or (take > group.room and group.tokens):
                break
            group.tokens += take
            group.pairs += self._pairs(request, take)
            group.room -= take
            request.computed += take
            if request.computed < request.prompt:
                break
            group.prompts += 1
            done.append(self.prompts.popleft())
        most = max(groups, key=lambda each: each.tokens)
        spent = self._cost(most, sum(each.tokens for each in groups), generating)
        self._advance(spent, 1 if load.mixed else 0)
        self.sums.prompts += spent
        for request in done:
            self._start(request)
        self._finish()

    def _generate(self) -> None:
        """Steps without prompts until a request ends, or one arrives."""
        if not self.running:
            if self.arriving:
                self.now = max(self.now, self.arriving[0][0])
            return
        load = self.load
        steps = max(0, ceil((self.running[0][0] - self.made) / load.tokens_per_step - 1e-9))
        if steps:
            spent = self._cost(_Group(0), 0, len(self.running), ahead=steps * load.tokens_per_step / 2)
            if self.arriving:
                until = max(1, ceil((self.arriving[0][0] - self.now) / spent))
                steps = min(steps, ceil((self.unread + until) / load.receive_steps) * load.receive_steps - self.unread)
            if self.prompts:
                steps = min(steps, load.wait_steps - self.waited)
                self.waited += steps
            self.unread = (self.unread + steps) % load.receive_steps
            self._advance(steps * spent, steps)
        self._finish()

    def _advance(self, seconds: float, steps: int) -> None:
        self.now += seconds
        self.sums.decoding += seconds * len(self.running)
        self.made += steps * self.load.tokens_per_step

    def _finish(self) -> None:
        sums = self.sums
        while self.running and self.running[0][0] <= self.made + 1e-9:
            request = heapq.heappop(self.running)[2]
            self.lengths -= request.prompt + request.cached + request.output - 1 - self.made
            self.used -= request.prompt + request.cached + request.output
            if request.output > 1:
                sums.token += (self.now - request.first) / (request.output - 1)
                sums.measured += 1
            sums.complete += 1
            sums.generated += request.output
            self._send()

    def _cost(self, group: _Group, prompt_tokens: int, requests: int, *, ahead: float = 0.0) -> float:
        """Seconds of a step. `ahead`: tokens that requests generate until the middle of the steps that are taken together."""
        load = self.load
        of_group = ceil(requests / load.groups)
        length = rounded(max(1.0, (self.lengths + requests * (self.made + ahead)) / requests)) if requests else 1
        tokens = ceil(group.tokens / 64) * 64 if group.tokens > 64 else group.tokens
        keys = rounded(max(1.0, group.pairs / group.tokens)) if group.tokens else 0
        work = StepWork(
            prompt_tokens=tokens,
            prompt_pairs=float(tokens * keys),
            prompts=group.prompts,
            requests=rounded(of_group),
            length=length,
            all_tokens=rounded(prompt_tokens + requests * (1 + load.drafts)),
            drafts=load.drafts,
            captured=0 < group.tokens + of_group * (1 + load.drafts) <= load.captured,
        )
        if work not in self.known:
            self.known[work] = self.seconds(work)
        return self.known[work]


def serve(load: Load, seconds: Callable[[StepWork], float]) -> Served:
    """What the clients of a replica see. `seconds`: those of a step."""
    return Simulation(load, seconds).run()
