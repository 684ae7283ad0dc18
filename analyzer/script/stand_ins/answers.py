"""Stand-ins that answer at once: sleep, tail -f, and commands that wait for another machine or ask about it."""

from __future__ import annotations

import os
import time

from analyzer.script.stand_ins import context
from analyzer.script.stand_ins.words import Syntax, split_words

LONGEST_SLEEP = 0.05
"""Seconds."""
SLEEPS = 100
"""Number of sleeps of the script itself after which it is ended: it waits for something that does not happen."""
ADDRESS = "127.0.0.1"
"""The address of every machine."""
INTERFACE = "eth0"
PING = Syntax(short="cCiIWwstlQpmMFST")
NSLOOKUP = Syntax(single="type query debug timeout port retry class")
HOST = Syntax(short="cNRtWmp")
IP_CHANGES = frozenset({"add", "del", "delete", "set", "flush", "replace", "change", "exec"})
HOST_DATABASES = ("hosts", "ahosts", "ahostsv4", "ahostsv6")


def sleep(words: list[str]) -> int:
    """Waits for a moment, so that a loop does not use a whole core."""
    if context.run_all():
        return context.run_behind("sleep", words)
    try:
        seconds = float((words or ["0"])[0].rstrip("smhd"))
    except ValueError:
        seconds = LONGEST_SLEEP
    time.sleep(min(max(seconds, 0.0), LONGEST_SLEEP))
    if os.getppid() == os.getpgrp():
        path = os.path.join(context.folder(), "sleeps")
        with open(path, "ab") as file:
            file.write(b".")
        if os.path.getsize(path) >= SLEEPS:
            from analyzer.script.stand_ins.records import stop

            stop("sleeps")
    return 0


def tail(words: list[str]) -> int:
    """Does not follow a file, which does not grow."""
    follows = any(word.startswith("--follow") or (word[:1] == "-" and word[1:2] != "-" and set("fF") & set(word)) for word in words)
    return 0 if follows else context.run_behind("tail", words)


def answer(name: str, words: list[str]) -> int:
    """Prints what the command would print about a machine that is reached, and succeeds."""
    if context.run_all():
        return context.run_behind(name, words)
    if name not in ANSWERS:
        return context.not_run([name, *words])
    lines = ANSWERS[name](words)
    if lines is None:
        return context.run_behind(name, words)
    if name not in LOCAL_NAMES or not lines:
        context.not_run([name, *words])
    os.write(1, "".join(f"{line}\n" for line in lines).encode())
    return 0


def _own_name() -> str:
    return os.uname().nodename or "localhost"


def _hostname(words: list[str]) -> list[str] | None:
    """Names and addresses, which depend on the network. Nothing for a new name of the machine; None for other uses."""
    options = "".join(word.lstrip("-")[:1] if word.startswith("--") else word[1:] for word in words if word.startswith("-"))
    if any(not word.startswith("-") for word in words) or set(options) & set("Fb"):
        return []
    if set(options) & set("iIa") and "--alias" not in words:
        return [f"{ADDRESS} " if "I" in options or "--all-ip-addresses" in words else ADDRESS]
    return [_own_name()] if set(options) & set("fA") else None


def _getent(words: list[str]) -> list[str] | None:
    if len(words) < 2 or words[0] not in HOST_DATABASES or all(map(_is_in_hosts, words[1:])):
        return None
    if words[0] == "hosts":
        return [f"{ADDRESS:15} {name}" for name in words[1:]]
    return [line for name in words[1:] for line in (f"{ADDRESS:15} STREAM {name}", f"{ADDRESS:15} DGRAM", f"{ADDRESS:15} RAW")]


def _is_in_hosts(name: str) -> bool:
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            return any(name in line.partition("#")[0].split() for line in file)
    except OSError:
        return False


def _ping(words: list[str]) -> list[str] | None:
    name = next(iter(split_words(words, PING)[1]), "localhost")
    return [
        f"PING {name} ({ADDRESS}) 56(84) bytes of data.",
        f"64 bytes from {name} ({ADDRESS}): icmp_seq=1 ttl=64 time=0.030 ms",
        "",
        f"--- {name} ping statistics ---",
        "1 packets transmitted, 1 received, 0% packet loss, time 0ms",
        "rtt min/avg/max/mdev = 0.030/0.030/0.030/0.000 ms",
    ]


def _nslookup(words: list[str]) -> list[str] | None:
    name = next(iter(split_words(words, NSLOOKUP)[1]), "localhost")
    return [f"Server:\t\t{ADDRESS}", f"Address:\t{ADDRESS}#53", "", f"Name:\t{name}", f"Address: {ADDRESS}", ""]


def _host(words: list[str]) -> list[str] | None:
    name = next(iter(split_words(words, HOST)[1]), "localhost")
    if _is_address(name):
        return [f"{'.'.join(reversed(name.split('.')))}.in-addr.arpa domain name pointer {_own_name()}."]
    return [f"{name} has address {ADDRESS}"]


def _dig(words: list[str]) -> list[str] | None:
    names = [word for word in words if not word.startswith(("+", "@", "-")) and word not in ("A", "AAAA", "ANY", "IN")]
    found = [f"{_own_name()}." if "-x" in words else ADDRESS for _ in names[:1]]
    if any(word.startswith("+short") for word in words):
        return found
    return [";; ANSWER SECTION:", *(f"{names[0]}.\t\t60\tIN\tA\t{text}" for text in found)]


def _ip(words: list[str]) -> list[str] | None:
    """The routes or addresses of one interface. Anything that sets something prints nothing."""
    options = [word for word in words if word.startswith("-")]
    objects = [word for word in words if not word.startswith("-")] or [""]
    if objects[0] in ("inet", "inet6"):
        objects = objects[1:] or [""]
    if not IP_CHANGES.isdisjoint(objects):
        return []
    if "route".startswith(objects[0] or "-"):
        if "get" in objects:
            return [f"{objects[-1]} dev {INTERFACE} src {ADDRESS} uid 0", "    cache"]
        return [f"default via {ADDRESS} dev {INTERFACE} proto dhcp src {ADDRESS} metric 100"]
    named = [
        word for word in objects[1:] if word not in ("show", "list", "ls", "dev", "up", "scope", "global", "primary", "dynamic")
    ]
    name = next(iter(named), INTERFACE)
    address = f"inet {ADDRESS}/24 brd 127.0.0.255 scope global {name}"
    if any(word.startswith("-") and "o" in word for word in options):
        return [f"2: {name}    {address}\\       valid_lft forever preferred_lft forever"]
    if any("br" in word for word in options):
        return [f"{name:16} UP             {ADDRESS}/24"]
    head = f"2: {name}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc mq state UP group default qlen 1000"
    return [
        head,
        "    link/ether 02:00:00:00:00:01 brd ff:ff:ff:ff:ff:ff",
        f"    {address}",
        "       valid_lft forever preferred_lft forever",
    ]


def _ifconfig(words: list[str]) -> list[str] | None:
    name = next((word for word in words if not word.startswith("-")), INTERFACE)
    if len([word for word in words if not word.startswith("-")]) > 1:
        return []
    return [
        f"{name}: flags=4163<UP,BROADCAST,RUNNING,MULTICAST>  mtu 1500",
        f"        inet {ADDRESS}  netmask 255.255.255.0  broadcast 127.0.0.255",
    ]


def _redis(words: list[str]) -> list[str] | None:
    return ["PONG"] if any(word.lower() == "ping" for word in words) else []


def _etcd(words: list[str]) -> list[str] | None:
    return ["127.0.0.1:2379 is healthy: successfully committed proposal"] if "health" in words else []


def _postgres(words: list[str]) -> list[str] | None:
    return [] if "-q" in words or "--quiet" in words else ["localhost:5432 - accepting connections"]


def _mysql(words: list[str]) -> list[str] | None:
    return ["mysqld is alive"] if "ping" in words else []


def _is_address(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 4 and all(part.isdecimal() for part in parts)


ANSWERS = {
    "hostname": _hostname, "getent": _getent, "ping": _ping, "ping6": _ping, "fping": _ping, "nslookup": _nslookup, "host": _host,
    "dig": _dig, "ip": _ip, "ifconfig": _ifconfig, "redis-cli": _redis, "etcdctl": _etcd, "pg_isready": _postgres,
    "mysqladmin": _mysql,
}  # fmt: skip
"""What each command prints; None if it is to run as it is. Commands that are not here print nothing."""
LOCAL_NAMES = frozenset({"hostname", "ip", "ifconfig", "getent"})
"""Commands about this machine, whose answers need no message."""
