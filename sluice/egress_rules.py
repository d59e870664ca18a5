"""Where the connections of tools may go.

The one source for the egress guard and for those who check declarations. Pure rules: which names a
declaration allows, and which addresses a name may stand for. Nothing is allowed by default. A name
has to be on the declaration's list, and every address that it resolves to has to be a public one,
or a private one that the configuration names. Some addresses are never reached, whatever is
configured: those that say "this host", those of groups, those that carry another address inside
them, and those at which clouds hand out the credentials of a machine.

Address blocks are those of the IANA special-purpose registries for IPv4 and IPv6.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
HOST_CHARS_MAX: Final = 253  # of a DNS name
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# The last label of what some resolvers and libraries read as a number: 2130706433, 0x7f000001, 1.
_NUMERIC: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


class Rule(Enum):
    """What a connection was refused for; bounded, so fit for a metric's label."""

    SCHEME = "scheme"
    USERINFO = "userinfo"
    HOST_FORM = "host_form"
    HOST_NOT_ALLOWED = "host_not_allowed"
    PORT_NOT_ALLOWED = "port_not_allowed"
    ADDRESS = "address"
    NO_ADDRESS = "no_address"


class EgressDeniedError(Exception):
    """A connection that may not be made. Its text is the rule's name, never a host or address."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.value)
        self.rule = rule


class Reach(Enum):
    """How far an address may be reached."""

    PUBLIC = "public"
    PRIVATE = "private"  # only if the configuration says so
    NEVER = "never"


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in texts)


_METADATA: Final = _networks(
    "169.254.169.254/32",  # most clouds
    "169.254.170.0/24",  # credentials of containers
    "100.100.100.200/32",
    "168.63.129.16/32",  # public by its number, a host's own service by its meaning
    "fd00:ec2::/32",
    "fd20:ce::254/128",
    "fe80::a9fe:a9fe/128",
)
_PRIVATE: Final = _networks(
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    "100.64.0.0/10",  # shared by customers of one provider
    *("127.0.0.0/8", "169.254.0.0/16"),
    *("::1/128", "fe80::/10", "fc00::/7"),
)
_NEVER_V4: Final = _networks(
    "0.0.0.0/8",
    "192.0.0.0/24",
    *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
    "192.88.99.0/24",  # relays of 6to4
    "198.18.0.0/15",  # benchmarks
    *("224.0.0.0/4", "240.0.0.0/4"),
)
# Of IPv6 only global unicast is in use; ::ffff:0:0/96, 64:ff9b::/96, ff00::/8 and :: lie outside.
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NEVER_V6: Final = _networks(
    "2001::/23",  # Teredo and other protocols
    "2001:db8::/32",
    "2002::/16",  # 6to4
    "3fff::/20",
)


def reach_of(address: Address) -> Reach:
    """How far an address may be reached; a scoped IPv6 address never."""
    if getattr(address, "scope_id", None) is not None:
        return Reach.NEVER
    if _within(address, _METADATA):
        return Reach.NEVER
    if _within(address, _PRIVATE):
        return Reach.PRIVATE
    if isinstance(address, IPv4Address):
        return Reach.NEVER if _within(address, _NEVER_V4) else Reach.PUBLIC
    is_global = address in _GLOBAL_V6 and not _within(address, _NEVER_V6)
    return Reach.PUBLIC if is_global else Reach.NEVER


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


@dataclass(frozen=True, slots=True)
class HostRule:
    """A name that may be reached: itself, or with ``below`` all names below it, at ``port`` or,
    with none, at the scheme's own port."""

    name: str
    below: bool = False
    port: int | None = None

    def covers(self, host: str) -> bool:
        """Whether ``host``, in canonical form, is meant."""
        return host.endswith(f".{self.name}") if self.below else host == self.name


@dataclass(frozen=True, slots=True)
class PrivateRule:
    """Private addresses that may be reached: those in ``network``, or whatever ``host`` is at
    ``port``."""

    network: Network | None = None
    host: str = ""
    port: int = 0

    def covers(self, host: str, port: int, address: Address) -> bool:
        """Whether ``address``, to which ``host`` resolved, may be reached at ``port``."""
        if self.network is not None:
            return address in self.network
        return (self.host, self.port) == (host, port)


@dataclass(frozen=True, slots=True)
class EgressRules:
    """What one declaration allows."""

    hosts: tuple[HostRule, ...] = ()
    private: tuple[PrivateRule, ...] = ()

    def check_target(self, scheme: str, host: str, port: int, userinfo: bool = False) -> str:
        """The canonical form of the host of a URL. ``host``: without brackets. Raises
        EgressDeniedError."""
        if scheme not in DEFAULT_PORTS:
            raise EgressDeniedError(Rule.SCHEME)
        if userinfo:
            raise EgressDeniedError(Rule.USERINFO)
        name = canonical_host(host)
        rules = [rule for rule in self.hosts if rule.covers(name)]
        if not rules:
            raise EgressDeniedError(Rule.HOST_NOT_ALLOWED)
        if not any(port == (rule.port or DEFAULT_PORTS[scheme]) for rule in rules):
            raise EgressDeniedError(Rule.PORT_NOT_ALLOWED)
        return name

    def allows(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether a URL may name this host and port; ``None``: the scheme's own."""
        try:
            self.check_target(scheme, host, port or DEFAULT_PORTS.get(scheme, 0))
        except EgressDeniedError:
            return False
        return True

    def check_addresses(self, host: str, port: int, texts: Sequence[str]) -> tuple[str, ...]:
        """The addresses that a canonical host resolved to, in their order. One that may not be
        reached refuses all: a name that stands for both is a name that lies. Raises
        EgressDeniedError."""
        addresses = [_address(text) for text in texts]
        if not addresses:
            raise EgressDeniedError(Rule.NO_ADDRESS)
        for address in addresses:
            reach = reach_of(address)
            allowed = reach is Reach.PUBLIC or (
                reach is Reach.PRIVATE
                and any(rule.covers(host, port, address) for rule in self.private)
            )
            if not allowed:
                raise EgressDeniedError(Rule.ADDRESS)
        return tuple(str(address) for address in dict.fromkeys(addresses))

    def may_reach(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether what a URL names may be reached as far as that is known before its name is
        resolved: a literal address, and the names that mean this machine. True for other names."""
        try:
            name = canonical_host(host)
            if name == "localhost" or name.endswith(".localhost"):
                texts = ["127.0.0.1"]
            elif _is_address(name):
                texts = [name]
            else:
                return True
            self.check_addresses(name, port or DEFAULT_PORTS.get(scheme, 0), texts)
        except EgressDeniedError:
            return False
        return True


def canonical_host(host: str) -> str:
    """Lower case; an address in its one canonical form. Raises EgressDeniedError for anything that
    is neither a DNS name nor a canonical address: a trailing dot, an empty label, a name whose end
    is a number (an address in decimal, octal or hexadecimal form), a scope, other alphabets (names
    are asked for in their ASCII form)."""
    name = host.lower()
    if not 1 <= len(name) <= HOST_CHARS_MAX:
        raise EgressDeniedError(Rule.HOST_FORM)
    try:
        address = ip_address(name)
    except ValueError:
        pass
    else:
        if "%" in name:
            raise EgressDeniedError(Rule.HOST_FORM)
        return str(address)
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or _NUMERIC.fullmatch(labels[-1]):
        raise EgressDeniedError(Rule.HOST_FORM)
    return name


def _address(text: str) -> Address:
    try:
        return ip_address(text)
    except ValueError:
        raise EgressDeniedError(Rule.ADDRESS) from None


def parse_host(text: str) -> HostRule:
    """One of ``Egress.hosts``: ``name``, ``*.name``, ``[address]``, each with ``:port`` or not.
    Raises ValueError with what is wrong."""
    host, port = _split_port(text)
    below = host.startswith("*.")
    try:
        name = canonical_host(host[2:] if below else host)
    except EgressDeniedError:
        raise ValueError("must be NAME, *.NAME or an address, with :PORT or without") from None
    if below and (name.count(".") < 1 or _is_address(name)):
        raise ValueError("a wildcard needs a domain of at least two labels below it")
    return HostRule(name, below, port)


def parse_private(text: str) -> PrivateRule:
    """One of ``Egress.private_allowed``: ``host:port`` or a CIDR. Raises ValueError."""
    if "/" in text:
        try:
            return PrivateRule(network=ip_network(text))
        except ValueError:
            raise ValueError("must be a CIDR without host bits") from None
    host, port = _split_port(text)
    if port is None:
        raise ValueError("must be HOST:PORT or a CIDR")
    try:
        return PrivateRule(host=canonical_host(host), port=port)
    except EgressDeniedError:
        raise ValueError("must be HOST:PORT or a CIDR") from None


def _split_port(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("must be [ADDRESS] or [ADDRESS]:PORT")
        digits = rest[1:] if rest else None
    elif text.count(":") == 1:
        host, _, digits = text.partition(":")
    else:
        host, digits = text, None
    if digits is None:
        return host, None
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits[:6]) <= 65_535:
        raise ValueError("the port must be 1 to 65535")
    return host, int(digits)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
