"""Where connections of tools may go: names, addresses, and how both are written.

The addresses of the corpus are what filters that look at text have let pass.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.egress_rules import (
    EgressDeniedError,
    EgressRules,
    HostRule,
    PrivateRule,
    Reach,
    Rule,
    canonical_host,
    parse_host,
    parse_private,
    reach_of,
)

PUBLIC = ("93.184.216.34", "1.1.1.1", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::200e")
PRIVATE = (
    *("127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("100.64.0.1", "100.127.255.255", "169.254.1.1"),
    *("::1", "fe80::1", "fc00::1", "fd12:3456::1"),
)
NEVER = (
    *("0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.170.2", "100.100.100.200"),
    *("168.63.129.16", "192.0.0.192", "224.0.0.1", "239.255.255.255", "255.255.255.255"),
    *("240.0.0.1", "192.88.99.1", "198.18.0.1", "203.0.113.1"),
    *("::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b:1::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "ff02::1", "fd00:ec2::254"),
    *("2001:db8::1", "fec0::1", "100::1", "fe80::1%eth0", "fd20:ce::254"),
)


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        *((text, Reach.PUBLIC) for text in PUBLIC),
        *((text, Reach.PRIVATE) for text in PRIVATE),
        *((text, Reach.NEVER) for text in NEVER),
    ],
)
def test_each_address_has_its_reach(text: str, reach: Reach) -> None:
    assert reach_of(ip_address(text)) is reach


@given(st.integers(0, 2**32 - 1))
def test_no_ipv4_address_is_public_that_the_standard_calls_otherwise(number: int) -> None:
    address = IPv4Address(number)
    if reach_of(address) is Reach.PUBLIC:
        assert not (address.is_private or address.is_loopback or address.is_link_local)
        assert not (address.is_multicast or address.is_reserved or address.is_unspecified)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["::ffff:0:0", "64:ff9b::", "::", "2002::"]))
def test_no_ipv6_address_that_carries_another_is_public(number: int, prefix: str) -> None:
    shift = 80 if prefix == "2002::" else 0
    address = IPv6Address(int(IPv6Address(prefix)) + (number << shift))
    assert reach_of(address) is not Reach.PUBLIC


WRONG_HOSTS = (
    *("", ".", "a..b", "example.org.", "-a.org", "a-.org", "a b", "a/b", "a@b", "a:80"),
    *("2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "1.2.3.4.5", "127.0.0.01"),
    *("a.0x", "a.1", "fe80::1%1", "bücher.de", "x" * 64 + ".org", "a." * 127 + "org", "[::1]"),
    *("local\x00host", "a%2eb", "１２７.0.0.1"),
)


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_a_host_that_is_no_canonical_name_or_address_is_refused(host: str) -> None:
    with pytest.raises(EgressDeniedError) as refused:
        canonical_host(host)
    assert refused.value.rule is Rule.HOST_FORM


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("EXAMPLE.org", "example.org"),
        ("xn--bcher-kva.de", "xn--bcher-kva.de"),
        ("localhost", "localhost"),
        ("_srv.a1.b2c", "_srv.a1.b2c"),
        ("0:0::0:1", "::1"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_host_has_one_form(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


RULES = EgressRules(
    hosts=tuple(
        parse_host(text)
        for text in ("api.example.org", "*.data.example.org", "odd.example.org:8443", "[::1]:9000")
    ),
    private=(parse_private("10.1.0.0/16"), parse_private("odd.example.org:8443")),
)


@pytest.mark.parametrize(
    ("scheme", "host", "port", "rule"),
    [
        ("https", "api.example.org", 443, None),
        ("http", "API.example.org", 80, None),
        ("https", "x.y.data.example.org", 443, None),
        ("https", "odd.example.org", 8443, None),
        ("http", "0::1", 9000, None),
        ("https", "api.example.org", 80, Rule.PORT_NOT_ALLOWED),
        ("https", "api.example.org", 22, Rule.PORT_NOT_ALLOWED),
        ("https", "odd.example.org", 443, Rule.PORT_NOT_ALLOWED),
        ("https", "data.example.org", 443, Rule.HOST_NOT_ALLOWED),
        ("https", "evildata.example.org", 443, Rule.HOST_NOT_ALLOWED),
        ("https", "api.example.org.evil.net", 443, Rule.HOST_NOT_ALLOWED),
        ("https", "xapi.example.org", 443, Rule.HOST_NOT_ALLOWED),
        ("https", "api.example.org.", 443, Rule.HOST_FORM),
        ("ftp", "api.example.org", 21, Rule.SCHEME),
        ("file", "", 0, Rule.SCHEME),
        ("gopher", "api.example.org", 70, Rule.SCHEME),
        ("HTTP", "api.example.org", 80, Rule.SCHEME),
    ],
)
def test_a_target_is_what_the_declaration_names_and_nothing_else(
    scheme: str, host: str, port: int, rule: Rule | None
) -> None:
    if rule is None:
        RULES.check_target(scheme, host, port)
        assert RULES.allows(scheme, host, port)
        return
    assert not RULES.allows(scheme, host, port)
    with pytest.raises(EgressDeniedError) as refused:
        RULES.check_target(scheme, host, port)
    assert refused.value.rule is rule


def test_a_user_in_a_url_is_refused() -> None:
    with pytest.raises(EgressDeniedError) as refused:
        RULES.check_target("https", "api.example.org", 443, userinfo=True)
    assert refused.value.rule is Rule.USERINFO


def test_nothing_is_allowed_by_default() -> None:
    assert not EgressRules().allows("https", "example.org", 443)
    assert not RULES.allows("https", "*.data.example.org", 443)


def test_one_address_that_may_not_be_reached_refuses_all() -> None:
    for texts in (["93.184.216.34", "127.0.0.1"], ["10.2.0.1"], ["nonsense"], ["10.1.0.1", "::"]):
        with pytest.raises(EgressDeniedError) as refused:
            RULES.check_addresses("api.example.org", 443, texts)
        assert refused.value.rule is Rule.ADDRESS
    with pytest.raises(EgressDeniedError) as refused:
        RULES.check_addresses("api.example.org", 443, [])
    assert refused.value.rule is Rule.NO_ADDRESS


def test_private_addresses_are_reached_where_the_configuration_says_so() -> None:
    assert RULES.check_addresses("api.example.org", 443, ["10.1.2.3"]) == ("10.1.2.3",)
    assert RULES.check_addresses("odd.example.org", 8443, ["127.0.0.1"]) == ("127.0.0.1",)
    with pytest.raises(EgressDeniedError):
        RULES.check_addresses("odd.example.org", 443, ["127.0.0.1"])
    with pytest.raises(EgressDeniedError):
        RULES.check_addresses("api.example.org", 8443, ["127.0.0.1"])


@pytest.mark.parametrize("text", NEVER)
def test_nothing_in_the_configuration_opens_what_is_never_reached(text: str) -> None:
    everything = EgressRules(
        hosts=(HostRule("a.org"),),
        private=(
            parse_private("0.0.0.0/0"),
            parse_private("::/0"),
            PrivateRule(host="a.org", port=80),
        ),
    )
    with pytest.raises(EgressDeniedError):
        everything.check_addresses("a.org", 80, [text])


@pytest.mark.parametrize(
    "text", ["", "*", "*.org", "*.1.2", "a.org:", "a.org:0", "a.org:65536", "a.org:x", "http://a"]
)
def test_a_wrong_host_of_a_declaration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        parse_host(text)


@pytest.mark.parametrize("text", ["", "a.org", "10.0.0.1/8", "10.0.0.0/33", "a/24", ":80", "[::1"])
def test_a_wrong_private_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_private(text)


@given(st.text(max_size=40))
def test_no_text_is_an_entry_by_accident(text: str) -> None:
    try:
        rule = parse_host(text)
    except ValueError:
        return
    assert rule.name == canonical_host(rule.name)


@pytest.mark.parametrize("host", [*PRIVATE, "localhost", "a.LOCALHOST"])
def test_what_is_private_by_its_looks_is_known_before_it_is_resolved(host: str) -> None:
    rules = EgressRules(private=(parse_private("10.0.0.0/8"), parse_private("localhost:443")))
    opened = host == "10.0.0.1" or host == "localhost"
    assert rules.may_reach("https", host, None) is opened
    assert not EgressRules().may_reach("https", host, None)
    assert not rules.may_reach("http", "localhost", None)  # another port


def test_other_names_and_public_addresses_are_judged_later() -> None:
    for host in (*PUBLIC, "example.org", "internal.corp"):
        assert EgressRules().may_reach("https", host, 8443)
    for host in NEVER:
        assert not EgressRules(private=(parse_private("169.254.0.0/16"),)).may_reach(
            "https", host, None
        )
