"""Certificates that are read, refused, and read again when their files change; no server runs."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path

import pytest
from certificates import Authority

from inferc.errors import ConfigError
from inferc.serve.security.tls import Certificates, TlsFiles


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def touch(path: Path) -> None:
    """Give a file a time of change of its own, however soon after the last one it was written."""
    seconds = path.stat().st_mtime + 10
    os.utime(path, (seconds, seconds))


def test_a_new_pair_of_files_is_taken(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cert, key = authority.issue("server")
    certificates = Certificates(TlsFiles(cert, key))
    before = certificates.expires
    certificates.refresh()
    assert certificates.expires == before and not caplog.messages, "nothing has changed"
    authority.issue("server", timedelta(days=25))
    touch(cert)
    certificates.refresh()
    assert certificates.expires > before + timedelta(days=4)
    assert [each for each in caplog.messages if "the certificates were read again; this one expires on" in each]


@pytest.mark.parametrize("harm", ["no key", "no file", "another's key"])
def test_files_that_cannot_be_used_leave_the_old_ones(
    harm: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.issue("server")
    certificates = Certificates(TlsFiles(cert, key))
    before, context = certificates.expires, certificates.ssl_context
    if harm == "no key":
        key.write_text("nothing")
    elif harm == "no file":
        key.unlink()
    else:
        key.write_bytes(authority.issue("other")[1].read_bytes())
        touch(key)
    certificates.refresh()
    assert certificates.expires == before and certificates.ssl_context is context
    (said,) = caplog.messages
    assert "the certificates stay as they were" in said and str(key) in said
    caplog.clear()
    certificates.refresh()
    assert not caplog.messages, "what was told once is not told at every look"
    authority.issue("server", timedelta(days=25))
    touch(cert)
    certificates.refresh()
    assert certificates.expires > before, "the next change is a new try"


def test_a_certificate_that_ends_soon_is_told_and_an_old_one_refused(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.issue("server", timedelta(days=5, hours=1))
    Certificates(TlsFiles(cert, key))
    assert f"{cert}: the certificate expires in 5 days; renew it" in caplog.text
    cert, key = authority.issue("server", timedelta(days=-1))
    with pytest.raises(ConfigError, match=r"the certificate expired on \d{4}-\d\d-\d\d; renew it"):
        Certificates(TlsFiles(cert, key))


@pytest.mark.parametrize(
    ("which", "text", "told"),
    [
        ("cert", "nothing", "server.pem: no certificate in PEM"),
        ("key", "nothing", "server-key.pem: no private key in PEM without a password"),
        ("client_ca", "nothing", "clients.pem: no certificate in PEM"),
        ("cert", None, "server.pem"),
        ("client_ca", None, "clients.pem"),
    ],
)
def test_what_is_no_certificate_is_told_by_its_file(
    which: str, text: str | None, told: str, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("server")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca.read_bytes())
    harmed = {"cert": cert, "key": key, "client_ca": clients}[which]
    if text is None:
        harmed.unlink()
    else:
        harmed.write_text(text)
    with pytest.raises(ConfigError) as raised:
        Certificates(TlsFiles(cert, key, clients))
    assert told in str(raised.value) and "\n" not in str(raised.value)
