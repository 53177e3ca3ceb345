"""Ordinary clients beside attacks: the share of their service that is left, and the server's state afterwards.

`python -m tests.faults.attacks --phase 9 --seconds 120 [--attacks slow_mask tokenize] [--cluster 2] [-- OPTIONS]`

The program measures three times: the ordinary clients alone, beside the attacks, and alone again. `OPTIONS` go to
the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import httpx
import psutil

from common.server import logs
from tests.cluster.conftest import running
from tests.faults.attackers import ATTACKS, Attackers
from tests.faults.ordinary import OrdinaryClients, Service
from tests.faults.raw_http import Target
from tests.server.support import PHASES, ServerProcess, asking_for_health

KEY = "a-key-of-the-suite"
ACCESS = {"env": {"INFER_API_KEY": KEY}, "headers": {"Authorization": f"Bearer {KEY}"}}

#: Statuses with which a server may refuse an attack.
REFUSALS = {"400", "401", "408", "413", "422", "429", "503"}
#: Attacks whose connections a server may close: their bytes come too slowly, or are never read.
MAY_BE_CUT = {"one_byte_chunks", "unread_bytes"}
ANSWERS_EACH, ATTACKED_S = 2, 5.0
#: Bytes by which a server may grow from the first attack to the second: the allocator keeps freed memory.
SLACK_BYTES = 128 * 2**20


def target_of(server: ServerProcess) -> Target:
    card = server.client.get("/v1/models").json()["data"][0]
    return Target(server.port, card["id"], KEY, card["max_model_len"])


def memory_bytes(server: ServerProcess) -> int:
    """Return the resident memory of the server and of the processes that it has started."""
    return sum(memory_by_role(server).values())


def memory_by_role(server: ServerProcess) -> Counter[str]:
    """Return the resident memory in bytes of the server and of the processes that it has started, by their role.

    Shared memory is left out: each process that maps Ray's object store would count it again, and the store keeps
    its pages.
    """
    process, total = psutil.Process(server.process.pid), Counter[str]()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            held = each.memory_info()
            total[role_of(each.cmdline())] += held.rss - getattr(held, "shared", 0)
    return total


def processor_s() -> dict[str, float]:
    """Return the processor time in seconds of this process, which runs the ordinary clients, and of its children,
    by role. Processes that try grammars end often, so their time is read from their parents."""
    here, spent = psutil.Process(), Counter[str]()
    for each in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used, role = each.cpu_times(), "clients" if each == here else role_of(each.cmdline())
            spent[role] += used.user + used.system
            if role in ("server", "replica"):
                spent["grammar trials"] += used.children_user + used.children_system
    return spent


def role_of(command: Sequence[str]) -> str:
    """Return the role of a process of the server, the cluster or the attacks."""
    line = " ".join(command)
    for name in ("front", "replica"):  # the name of the method that runs follows
        if line.startswith(f"ray::ServeReplica:infer:{name}"):
            return name
    if "tests.faults.attackers" in line:
        return "attackers"
    if "hosting.child" in line:
        return "engine"
    if "/ray/" in line or line.startswith("ray::"):
        return "Ray"
    return "grammar trials" if "constrained/trial" in line else "server"


# ---------------------------------------------------------------------- for tests


def assert_ordinary_clients_are_served(
    server: ServerProcess, names: Sequence[str], *, pulse_s: float = logs.PULSE_EVERY_S
) -> None:
    """Attack a server twice, each time until every ordinary client has its right answers.

    During the attacks `/health` must be 200, and every attack must be answered or refused. Afterwards the server
    must be idle, serve the next request, and be no larger than after the first time. It returns freed memory to
    the system every `pulse_s` seconds.
    """
    target = target_of(server)
    clients = OrdinaryClients(target)
    asyncio.run(clients.learn())
    most = 0  # bytes that the server may hold after an attack; the first attack sets the measure
    for _ in range(2):
        attackers = Attackers(target, names)
        try:
            with asking_for_health(server.url) as health:
                service = asyncio.run(clients.ask_until_each_has(ANSWERS_EACH, at_least_s=ATTACKED_S))
        finally:
            outcomes = attackers.stop()
        assert service.mistakes == []
        assert {each.status_code for each in health} == {200}
        for name, counted in outcomes.items():
            cut = {"closed"} if name in MAY_BE_CUT else set()
            assert set(counted) <= REFUSALS | {"200", "left"} | cut, (name, counted)
        server.begin_test()  # waits until all requests have ended
        returned_by = time.monotonic() + pulse_s + 1
        while (held := memory_bytes(server)) > most and time.monotonic() < returned_by:
            time.sleep(0.5)
        assert most == 0 or held <= most, f"{held} bytes after the second attack, {most} at most"
        most = held + SLACK_BYTES
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.process.poll() is None


# ---------------------------------------------------------------------- the program


def measure(server: ServerProcess, names: Sequence[str], seconds: float) -> None:
    target = target_of(server)
    clients = OrdinaryClients(target)
    asyncio.run(clients.learn())
    print_memory(server, "before")
    rates = []
    for moment in ("alone", "beside", "alone again"):
        attackers = Attackers(target, names, seconds + 60) if moment == "beside" else None
        memory, before, counted = [memory_bytes(server)], processor_s(), server.counters()
        with asking_for_health(server.url) as health:
            service = asyncio.run(watching_memory(server, memory, clients, seconds))
        rates.append(service.tokens / seconds)
        print_moment(moment, rates, service, health, memory)
        spent = {name: taken - before.get(name, 0.0) for name, taken in processor_s().items()}
        shares = [f"{name} {taken / seconds:.2f}" for name, taken in sorted(spent.items())]
        print(f"  cores: {', '.join(shares)}")
        made = {name: (now - counted[name]) / seconds for name, now in server.counters().items()}
        print(
            f"  engines: {made['steps']:.0f} steps/s, {made['decode_tokens']:.0f} tokens/s for all clients, "
            f"{made['busy_s']:.2f} s of steps a second",
            flush=True,
        )
        if attackers is not None:
            for name, counted in attackers.stop().items():
                said = ", ".join(f"{count} x {outcome}" for outcome, count in counted.items())
                print(f"  {name}: {said or 'nothing was answered'}")
    server.begin_test()
    print_memory(server, "idle")
    time.sleep(logs.PULSE_EVERY_S + 1)
    print_memory(server, "after the next pulse")


def print_memory(server: ServerProcess, moment: str) -> None:
    held = memory_by_role(server)
    roles = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in sorted(held.items()))
    print(f"{moment}: {held.total() / 2**20:.0f} MiB ({roles})", flush=True)


async def watching_memory(
    server: ServerProcess, memory: list[int], clients: OrdinaryClients, seconds: float
) -> Service:
    async def watch() -> None:
        while True:
            memory.append(await asyncio.to_thread(memory_bytes, server))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    try:
        return await clients.ask_for(seconds)
    finally:
        watching.cancel()


def print_moment(
    moment: str, rates: list[float], service: Service, health: list[httpx.Response], memory: list[int]
) -> None:
    # A server that is overloaded may have answered only once.
    waits = sorted(each.elapsed.total_seconds() for each in health)
    failed = {each.status_code for each in health} - {200}
    middle, p99, most = (waits[round(share * (len(waits) - 1))] for share in (0.5, 0.99, 1.0))
    print(
        f"{moment}: {rates[-1]:.0f} tokens/s (x {rates[-1] / rates[0]:.2f}), {sum(service.answers)} answers, "
        f"{service.refused} x 503, {len(service.mistakes)} mistakes; "
        f"/health p50 {middle * 1e3:.0f}, p99 {p99 * 1e3:.0f}, max {most * 1e3:.0f} ms"
        f"{f', not 200: {sorted(failed)}' if failed else ''}; "
        f"memory {memory[0] / 2**20:.0f} MiB, at most {max(memory) / 2**20:.0f}",
        flush=True,
    )
    for mistake in service.mistakes[:5]:
        print(f"  {mistake}")


@contextlib.contextmanager
def serving(
    phase: str, options: Sequence[str] = (), *, replicas: int = 0, module: str | None = None
) -> Iterator[ServerProcess]:
    """Run one server, of a module whose first argument is the phase's name, or a cluster of `replicas` replicas."""
    if replicas:
        with running(phase, "--replicas", str(replicas), *options, **ACCESS) as cluster:
            yield cluster
    else:
        server = ServerProcess(phase, *options, module=module, **ACCESS)
        try:
            yield server
        finally:
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--phase", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the three times")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument(
        "--cluster", type=int, default=0, metavar="REPLICAS", help="a cluster instead of a server"
    )
    parser.add_argument("options", nargs="*", metavar="OPTIONS", help="of the server, after --")
    arguments = parser.parse_args()
    (phase,) = (name for name in PHASES if name.startswith(f"phase{arguments.phase}_"))
    with serving(phase, arguments.options, replicas=arguments.cluster) as server:
        measure(server, arguments.attacks, arguments.seconds)


if __name__ == "__main__":
    main()
